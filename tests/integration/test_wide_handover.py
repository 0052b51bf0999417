"""A node of one width computes a prompt, and a node of another width continues it, in one process: the answer is the whole model's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import NodeLost
from tandem.engine.config import SchedulerConfig
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tests.engine.model import tiny
from tests.integration.far_machines import is_there
from tests.integration.one_engine import (
    PATIENT,
    OneEngine,
    expect_read_where_it_decodes,
    hand_over,
    hand_over_all,
    prompts_in_pairs,
    run_on,
)
from tests.more import more

NEW_TOKENS = 8
CHUNK = 24  # tokens of a step: longer prompts are read in several
Width = int | tuple[int, int]
"""Ranks of a node, or ranks and the stages that they make."""
Answers = Callable[[str], tuple[Path, list[list[int]]]]


def start(
    model: Path,
    name: str,
    width: Width,
    block_size: int = 4,
    transfer: TransferConfig | None = None,
    *,
    max_model_len: int | None = None,
    **options: Any,
) -> OneEngine:
    return OneEngine.start(
        model,
        name,
        block_size,
        transfer,
        scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK, max_model_len=max_model_len),
        memory_bytes=4 << 20,
        prefix_caching=transfer is not None,
        width=width if isinstance(width, int) else width[0],
        stages=1 if isinstance(width, int) else width[1],
        **options,
    )


PROMPTS = prompts_in_pairs((5, CHUNK, 61, 130), tiny.VOCAB)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What transformers generates."""

    @functools.cache
    def answer(architecture: str) -> tuple[Path, list[list[int]]]:
        path = tiny.save(architecture, tmp_path_factory.mktemp("models"))
        return path, [found.tokens for found in tiny.reference(path, PROMPTS, NEW_TOKENS)]

    return answer


@dataclasses.dataclass(frozen=True)
class Case:
    """`apart`: whether the ranks of producer and consumer keep their heads, and their stage's layers, in caches of their own, as GPUs do.

    Two heads of keys and values: four ranks keep each of them twice. Phi 3 has all heads on every rank, Gemma 3 windows, and all ranks keep
    DeepSeek's latents."""

    model: str
    widths: tuple[Width, Width]
    direction: str
    blocks: tuple[int, int] = (4, 4)
    apart: tuple[bool, bool] = (False, False)


APART = (True, True)
CASES = [
    Case("llama", (4, 2), "push", (8, 4)),
    Case("gemma3", (2, 1), "push"),
    Case("mixtral", ((4, 2), 1), "pull"),
    Case("phi3", (2, 2), "push", apart=APART),
    Case("llama", (1, (2, 2)), "pull", (4, 8), apart=(False, True)),
    Case("qwen3-moe", ((2, 2), (4, 2)), "pull", apart=APART),
    Case("deepseek-v3", (4, 2), "push", (4, 8), apart=APART),
]
MORE_CASES = [
    Case("deepseek-v3", (2, 4), "push", (8, 4)),
    Case("gemma3", (1, 4), "pull", apart=(False, True)),
    Case("llama", (1, 2), "push", (4, 8)),
    Case("llama", (1, 4), "pull"),
    Case("phi3", (1, 2), "pull"),
    Case("llama", (1, 2), "push"),
    Case("llama", (2, 1), "pull"),
    Case("llama", (4, 1), "push"),
    Case("llama", (2, 4), "push"),
    Case("llama", (4, 2), "pull"),
    Case("llama", (2, 4), "pull", (8, 4)),
    Case("gemma3", (2, 4), "pull"),
    Case("phi3", (2, 1), "push"),
    Case("mixtral", (4, 2), "push"),
    Case("llama", ((2, 2), 1), "push"),
    Case("llama", (1, (2, 2)), "pull"),
    Case("llama", ((4, 2), (2, 2)), "push", (4, 8)),
    Case("gemma3", (2, (4, 2)), "push"),
    Case("llama", (2, 1), "push", (4, 8), apart=(True, False)),
    Case("llama", (2, 4), "push", (8, 4), apart=APART),
    Case("qwen2", ((2, 2), (2, 2)), "push", (4, 8), apart=APART),
    Case("gemma3", ((2, 2), (6, 3)), "pull", (8, 4), apart=APART),
    Case("llama", (1, 2), "push", apart=(False, True)),
    Case("llama", (2, 2), "push", apart=APART),
    Case("llama", (2, 2), "pull", apart=APART),
    Case("llama", (4, 2), "pull", (4, 8), apart=APART),
    Case("llama", (2, 2), "pull", apart=(True, False)),
    Case("llama", (4, 2), "push", apart=(False, True)),
    Case("gemma3", (2, 2), "push", apart=APART),
    Case("mixtral", (2, 4), "push", apart=APART),
    Case("llama", ((2, 2), 1), "push", apart=(True, False)),
    Case("llama", ((4, 2), 2), "pull", (8, 4), apart=APART),
    Case("llama", (2, (4, 2)), "push", apart=(False, True)),
    Case("qwen3", ((4, 2), (2, 2)), "pull", apart=(True, False)),
    Case("gemma2", ((4, 2), (2, 2)), "push", (8, 4), apart=APART),
    Case("gemma3", ((4, 4), (3, 3)), "push", apart=APART),
    Case("mixtral", (2, (2, 2)), "pull", apart=APART),
    Case("phi3", ((4, 2), (2, 2)), "push", apart=APART),
    Case("deepseek-v2", (1, 2), "pull", apart=(False, True)),
    Case("deepseek-v3", ((4, 2), 1), "pull", (8, 4), apart=(True, False)),
]


@pytest.mark.parametrize("case", [*CASES, *more(MORE_CASES)], ids=lambda case: f"{case.model}-{case.direction}")
def test_the_tokens_are_those_of_generate(answers: Answers, case: Case) -> None:
    path, expected = answers(case.model)
    config = TransferConfig(**PATIENT, direction=case.direction, checksums="all")  # type: ignore[arg-type]
    with contextlib.ExitStack() as both:
        producer, consumer = (
            both.enter_context(start(path, name, width, size, config, apart=apart))
            for name, width, size, apart in zip("pc", case.widths, case.blocks, case.apart, strict=True)
        )
        hand_over_all(producer, consumer, PROMPTS, expected)
        assert consumer.stats().blocks_checked


# A node of ranks that keep one cache; and of ranks that keep their heads, or their stage's layers, apart.
TierCase = tuple[str, Width, bool, str]
TIERS: list[TierCase] = [("llama", 2, False, "cpu"), ("llama", (4, 2), True, "disk")]
MORE_TIERS: list[TierCase] = [
    ("qwen3", (2, 2), True, "cpu"),
    ("llama", 2, True, "cpu"),
    ("llama", (2, 2), True, "cpu"),
    ("mixtral", 4, True, "disk"),
]


@pytest.mark.parametrize(("model", "width", "apart", "kind"), [*TIERS, *more(MORE_TIERS)])
def test_a_tier_keeps_what_all_ranks_have(
    answers: Answers, tmp_path: Path, model: str, width: Width, apart: bool, kind: str
) -> None:
    """Eight blocks of four tokens on the device: each prompt takes the place of the one before it."""
    path, _ = answers(model)
    tier = TierConfig(cpu=4 << 20) if kind == "cpu" else TierConfig(disk=str(tmp_path), size=64 << 20)
    with start_with(path, tier, width, apart=apart) as engine:
        expect_loads(engine, path)


def start_with(path: Path, tier: TierConfig, width: Width, *, apart: bool, processes: bool = False) -> OneEngine:
    options = {"tiers": [tier], "num_blocks": 25, "max_model_len": 96}
    return start(path, "tiers", width, transfer=TransferConfig(), apart=apart, processes=processes, **options)


def expect_loads(engine: OneEngine, path: Path) -> None:
    chance = random.Random(3)
    documents = [[chance.randrange(3, tiny.VOCAB) for _ in range(61)] for _ in range(4)]
    expected = [found.tokens for found in tiny.reference(path, documents, NEW_TOKENS)]
    for turn in range(3):
        for index, document in enumerate(documents):
            assert engine.answer(f"r{turn}-{index}", document, NEW_TOKENS) == expected[index]
    computed = engine.engine.scheduler.stats().prompt_tokens_computed
    assert computed < sum(map(len, documents)) * 2, "the tier brought nothing back"


def test_processes_keep_tiers_apart_and_a_rank_that_is_lost_ends_the_node(answers: Answers, tmp_path: Path) -> None:
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
            run_on(engine, "r", time.monotonic() + 60.0)
    finally:
        began = time.monotonic()
        engine.close()
    assert time.monotonic() < began + 20, "it does not wait for what cannot come"


@pytest.mark.more  # tests/kvtransfer/test_connector_contract.py has such processes with less of a model
@pytest.mark.parametrize(("direction", "width"), [("pull", 2), ("push", 2), ("push", (2, 2))])
def test_processes_with_heads_apart_hand_over_and_end_with_their_node(
    answers: Answers, direction: str, width: Width
) -> None:
    path, expected = answers("llama")
    config = TransferConfig(**PATIENT, direction=direction, checksums="all")  # type: ignore[arg-type]
    with contextlib.ExitStack() as both:
        engines = producer, consumer = [
            both.enter_context(start(path, name, width, 4, config, apart=True, processes=True)) for name in "pc"
        ]
        for index in (1, 3, 6):
            prompt = PROMPTS[index]
            assert hand_over(producer, consumer, f"r{index}", prompt, NEW_TOKENS) == expected[index]
        assert set(consumer.stats().outcomes) == {"received"}
        pids = [pid for engine in engines if engine.supervised for pid in engine.supervised.pids]
        assert len(pids) == 2
        assert all(map(is_there, pids))
    assert not any(map(is_there, pids))


@pytest.mark.more
@pytest.mark.parametrize("width", [pytest.param(2, id="heads"), pytest.param((2, 2), id="layers")])
def test_a_node_that_loses_a_rank_with_heads_apart_ends_without_waiting(answers: Answers, width: Width) -> None:
    """A rank ends while its KV is being sent: the consumer computes the prompt itself."""
    path, expected = answers("llama")
    config = TransferConfig(connector="nixl", checksums="all", lease_s=2.0)
    with (
        start(path, "p", width, 4, config, apart=True, processes=True) as producer,
        start(path, "c", 2, 4, config, apart=True) as consumer,
    ):
        prompt, answer = PROMPTS[-2], expected[-2]
        assert hand_over(producer, consumer, "first", prompt, NEW_TOKENS) == answer
        assert producer.supervised is not None
        other = [token + 1 for token in prompt]
        (right,) = (found.tokens for found in tiny.reference(path, [other], NEW_TOKENS))
        (pid,) = producer.supervised.pids
        expect_read_where_it_decodes(producer, consumer, other, right, lambda: os.kill(pid, signal.SIGKILL))
