"""A node of one width computes a prompt, and a node of another width continues it, in one process: the answer is the whole model's."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.base.errors import NodeLost
from tandem.engine.config import SchedulerConfig
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.wire.requests import KVTransferParams, TransferRole
from tests.engine.model import tiny
from tests.integration.one_engine import OneEngine, hand_over
from tests.more import more

NEW_TOKENS = 8
CHUNK = 24  # tokens of a step: longer prompts are read in several
LENGTHS = (5, 24, 61, 130)
Width = int | tuple[int, int]
"""Ranks of a node, or ranks and the stages that they make."""


def start(
    model: Path,
    name: str,
    width: Width,
    block_size: int = 4,
    transfer: TransferConfig | None = None,
    *,
    apart: bool = False,
    processes: bool = False,
) -> OneEngine:
    return OneEngine.start(
        model,
        name,
        block_size,
        transfer,
        scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK),
        memory_bytes=4 << 20,
        prefix_caching=transfer is not None,
        width=width if isinstance(width, int) else width[0],
        stages=1 if isinstance(width, int) else width[1],
        apart=apart,
        processes=processes,
    )


def prompts() -> list[list[int]]:
    """Pairs of prompts with the same beginning: the second one finds it in both nodes' prefix caches."""
    chance = random.Random(7)
    found = []
    for length in LENGTHS:
        prompt = [chance.randrange(3, tiny.VOCAB) for _ in range(length)]
        found += [prompt, prompt[: length * 2 // 3] + [chance.randrange(3, tiny.VOCAB) for _ in range(20)]]
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """What transformers generates."""

    @functools.cache
    def answer(architecture: str) -> tuple[Path, list[list[int]]]:
        path = tiny.save(architecture, tmp_path_factory.mktemp("models"))
        return path, [found.tokens for found in tiny.reference(path, prompts(), NEW_TOKENS)]

    return answer


@contextlib.contextmanager
def pair(
    model: Path,
    widths: tuple[Width, Width],
    blocks: tuple[int, int],
    transfer: TransferConfig,
    apart: tuple[bool, bool] = (False, False),
) -> Iterator[tuple[OneEngine, OneEngine]]:
    with contextlib.ExitStack() as both:
        engines = []
        for name, width, block_size, alone in zip("pc", widths, blocks, apart, strict=True):
            engines.append(start(model, name, width, block_size, transfer, apart=alone))
            both.callback(engines[-1].close)
        yield engines[0], engines[1]


# Two heads of keys and values: four ranks keep each of them twice. Phi 3 has all heads on every rank, Gemma 3 windows, and all
# ranks keep DeepSeek's latents.
Case = tuple[str, tuple[Width, Width], str, tuple[int, int]]
CASES: list[Case] = [
    ("llama", (1, 2), "push", (4, 8)),
    ("llama", (4, 2), "push", (8, 4)),
    ("gemma3", (2, 1), "push", (4, 4)),
    ("mixtral", ((4, 2), 1), "pull", (4, 4)),
    ("deepseek-v3", (2, 4), "push", (8, 4)),
]
MORE_CASES: list[Case] = [
    ("llama", (1, 4), "pull", (4, 4)),
    ("phi3", (1, 2), "pull", (4, 4)),
    ("llama", (1, 2), "push", (4, 4)),
    ("llama", (2, 1), "pull", (4, 4)),
    ("llama", (4, 1), "push", (4, 4)),
    ("llama", (2, 4), "push", (4, 4)),
    ("llama", (4, 2), "pull", (4, 4)),
    ("llama", (2, 4), "pull", (8, 4)),
    ("gemma3", (2, 4), "pull", (4, 4)),
    ("phi3", (2, 1), "push", (4, 4)),
    ("mixtral", (4, 2), "push", (4, 4)),
    ("llama", ((2, 2), 1), "push", (4, 4)),
    ("llama", (1, (2, 2)), "pull", (4, 4)),
    ("llama", ((4, 2), (2, 2)), "push", (4, 8)),
    ("gemma3", (2, (4, 2)), "push", (4, 4)),
]


@pytest.mark.parametrize(("model", "widths", "direction", "blocks"), [*CASES, *more(MORE_CASES)])
def test_the_tokens_are_those_of_generate(
    answers: Callable[[str], tuple[Path, list[list[int]]]],
    model: str,
    widths: tuple[Width, Width],
    direction: str,
    blocks: tuple[int, int],
) -> None:
    path, expected = answers(model)
    config = TransferConfig(connector="nixl", direction=direction, checksums="all")
    with pair(path, widths, blocks, config) as (producer, consumer):
        for index, (prompt, answer) in enumerate(zip(prompts(), expected, strict=True)):
            assert hand_over(producer, consumer, f"r{index}", prompt, NEW_TOKENS) == answer, len(prompt)
        assert set(consumer.stats().outcomes) == {"received"}
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0


# The same with caches apart, as GPUs have them: on either side, on both, and beside ranks that keep one cache.
ApartCase = tuple[str, tuple[Width, Width], tuple[bool, bool], str, tuple[int, int]]
APART: list[ApartCase] = [
    ("llama", (2, 1), (True, False), "push", (4, 8)),
    ("gemma3", (1, 4), (False, True), "pull", (4, 4)),
    ("phi3", (2, 2), (True, True), "push", (4, 4)),
    # And their stage's layers.
    ("llama", (1, (2, 2)), (False, True), "pull", (4, 8)),
    ("qwen3-moe", ((2, 2), (4, 2)), (True, True), "pull", (4, 4)),
    ("deepseek-v3", (4, 2), (True, True), "push", (4, 8)),
]
MORE_APART: list[ApartCase] = [
    ("llama", (2, 4), (True, True), "push", (8, 4)),
    ("qwen2", ((2, 2), (2, 2)), (True, True), "push", (4, 8)),
    ("gemma3", ((2, 2), (6, 3)), (True, True), "pull", (8, 4)),
    ("llama", (1, 2), (False, True), "push", (4, 4)),
    ("llama", (2, 2), (True, True), "push", (4, 4)),
    ("llama", (2, 2), (True, True), "pull", (4, 4)),
    ("llama", (4, 2), (True, True), "pull", (4, 8)),
    ("llama", (2, 2), (True, False), "pull", (4, 4)),
    ("llama", (4, 2), (False, True), "push", (4, 4)),
    ("gemma3", (2, 2), (True, True), "push", (4, 4)),
    ("mixtral", (2, 4), (True, True), "push", (4, 4)),
    ("llama", ((2, 2), 1), (True, False), "push", (4, 4)),
    ("llama", ((4, 2), 2), (True, True), "pull", (8, 4)),
    ("llama", (2, (4, 2)), (False, True), "push", (4, 4)),
    ("qwen3", ((4, 2), (2, 2)), (True, False), "pull", (4, 4)),
    ("gemma2", ((4, 2), (2, 2)), (True, True), "push", (8, 4)),
    ("gemma3", ((4, 4), (3, 3)), (True, True), "push", (4, 4)),
    ("mixtral", (2, (2, 2)), (True, True), "pull", (4, 4)),
    ("phi3", ((4, 2), (2, 2)), (True, True), "push", (4, 4)),
    ("deepseek-v2", (1, 2), (False, True), "pull", (4, 4)),
    ("deepseek-v3", ((4, 2), 1), (True, False), "pull", (8, 4)),
]


@pytest.mark.parametrize(("model", "widths", "apart", "direction", "blocks"), [*APART, *more(MORE_APART)])
def test_and_where_ranks_keep_their_heads_apart(
    answers: Callable[[str], tuple[Path, list[list[int]]]],
    model: str,
    widths: tuple[Width, Width],
    apart: tuple[bool, bool],
    direction: str,
    blocks: tuple[int, int],
) -> None:
    path, expected = answers(model)
    config = TransferConfig(connector="nixl", direction=direction, checksums="all")
    with pair(path, widths, blocks, config, apart) as (producer, consumer):
        for index, (prompt, answer) in enumerate(zip(prompts(), expected, strict=True)):
            assert hand_over(producer, consumer, f"r{index}", prompt, NEW_TOKENS) == answer, len(prompt)
        stats = consumer.stats()
        assert set(stats.outcomes) == {"received"}
        assert stats.blocks_checked
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0


# A node of ranks that keep one cache; and of ranks that keep their heads, or their stage's layers, apart.
TierCase = tuple[str, Width, bool, str]
TIERS: list[TierCase] = [("llama", 2, False, "cpu"), ("llama", (4, 2), True, "disk"), ("qwen3", (2, 2), True, "cpu")]
MORE_TIERS: list[TierCase] = [("llama", 2, True, "cpu"), ("llama", (2, 2), True, "cpu"), ("mixtral", 4, True, "disk")]


@pytest.mark.parametrize(("model", "width", "apart", "kind"), [*TIERS, *more(MORE_TIERS)])
def test_a_tier_keeps_what_all_ranks_have(
    answers: Callable[[str], tuple[Path, list[list[int]]]],
    tmp_path: Path,
    model: str,
    width: Width,
    apart: bool,
    kind: str,
) -> None:
    """Eight blocks of four tokens on the device: each prompt takes the place of the one before it."""
    path, _ = answers(model)
    tier = TierConfig(cpu=4 << 20) if kind == "cpu" else TierConfig(disk=str(tmp_path), size=64 << 20)
    engine = start_with(path, tier, width, apart=apart)
    try:
        expect_loads(engine, path)
    finally:
        engine.close()


def start_with(path: Path, tier: TierConfig, width: Width, *, apart: bool, processes: bool = False) -> OneEngine:
    return OneEngine.start(
        path,
        "tiers",
        4,
        TransferConfig(),
        scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK, max_model_len=96),
        memory_bytes=4 << 20,
        prefix_caching=True,
        tiers=[tier],
        num_blocks=25,
        width=width if isinstance(width, int) else width[0],
        stages=1 if isinstance(width, int) else width[1],
        apart=apart,
        processes=processes,
    )


def expect_loads(engine: OneEngine, path: Path) -> None:
    chance = random.Random(3)
    documents = [[chance.randrange(3, tiny.VOCAB) for _ in range(61)] for _ in range(4)]
    expected = [found.tokens for found in tiny.reference(path, documents, NEW_TOKENS)]
    for turn in range(3):
        for index, document in enumerate(documents):
            assert engine.answer(f"r{turn}-{index}", document, NEW_TOKENS) == expected[index]
    computed = engine.engine.scheduler.stats().prompt_tokens_computed
    assert computed < sum(map(len, documents)) * 2, "the tier brought nothing back"


def test_processes_keep_tiers_apart_and_a_rank_that_is_lost_ends_the_node(
    answers: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    path, _ = answers("llama")
    tier = TierConfig(disk=str(tmp_path), size=64 << 20)
    engine = start_with(path, tier, (2, 2), apart=True, processes=True)
    try:
        expect_loads(engine, path)
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["rank0of2", "rank1of2"]
        assert engine.supervised is not None
        (pid,) = engine.supervised.pids
        engine.add("r", list(range(3, 64)), NEW_TOKENS, None)
        engine.run("r", [], time.monotonic() + 60.0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NodeLost, match="rank 1 has ended"):
            run_on(engine, time.monotonic() + 60.0)
    finally:
        began = time.monotonic()
        engine.close()
    assert time.monotonic() < began + 20, "it does not wait for what cannot come"


def run_on(engine: OneEngine, until: float) -> None:
    while True:
        engine.run("r", [], until)


def is_there(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(("direction", "width"), [("pull", 2), *more([("push", 2), ("push", (2, 2))])])
def test_processes_with_heads_apart_hand_over_and_end_with_their_node(
    answers: Callable[[str], tuple[Path, list[list[int]]]], direction: str, width: Width
) -> None:
    path, expected = answers("llama")
    config = TransferConfig(connector="nixl", direction=direction, checksums="all")  # type: ignore[arg-type]
    with contextlib.ExitStack() as both:
        engines = []
        for name in ("p", "c"):
            engine = start(path, name, width, 4, config, apart=True, processes=True)
            both.callback(engine.close)
            engines.append(engine)
        producer, consumer = engines
        for index in (1, 3, 6):
            prompt = prompts()[index]
            assert hand_over(producer, consumer, f"r{index}", prompt, NEW_TOKENS) == expected[index]
        assert set(consumer.stats().outcomes) == {"received"}
        pids = [pid for engine in engines if engine.supervised for pid in engine.supervised.pids]
        assert len(pids) == 2
        assert all(map(is_there, pids))
    assert not any(map(is_there, pids))


@pytest.mark.more
@pytest.mark.parametrize("width", [pytest.param(2, id="heads"), pytest.param((2, 2), id="layers")])
def test_a_node_that_loses_a_rank_with_heads_apart_ends_without_waiting(
    answers: Callable[[str], tuple[Path, list[list[int]]]], width: Width
) -> None:
    """A rank ends while its KV is being sent: the consumer computes the prompt itself."""
    path, expected = answers("llama")
    config = TransferConfig(connector="nixl", checksums="all", lease_s=2.0)
    with contextlib.ExitStack() as both:
        producer = start(path, "p", width, 4, config, apart=True, processes=True)
        both.callback(producer.close)
        consumer = start(path, "c", 2, 4, config, apart=True)
        both.callback(consumer.close)
        prompt, answer = prompts()[-2], expected[-2]
        assert hand_over(producer, consumer, "first", prompt, NEW_TOKENS) == answer
        assert producer.address
        assert consumer.address
        assert producer.supervised is not None
        other = [token + 1 for token in prompt]
        (right,) = (found.tokens for found in tiny.reference(path, [other], NEW_TOKENS))
        tokens: list[int] = []
        until = time.monotonic() + 60.0
        consumer.add("r", other, NEW_TOKENS, KVTransferParams("t", TransferRole.CONSUME, producer.address))
        consumer.run("r", tokens, until)
        producer.add("r", other, 1, KVTransferParams("t", TransferRole.PRODUCE, consumer.address))
        producer.run("r", [], until)
        (pid,) = producer.supervised.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NodeLost, match="rank 1 has ended"):
            run_on(producer, until)
        while not consumer.run("r", tokens, until):
            pass
        assert tokens == right
        assert consumer.engine.scheduler.stats().prompt_tokens_computed > 0
