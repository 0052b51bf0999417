"""Models with sliding windows: each node frees the blocks before the window at its own time, and the answer is that of a single engine.
The weights are random, so that KV at a wrong position changes the answer."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.kvtransfer.config import TransferConfig
from tests.engine.model import tiny
from tests.integration.one_engine import OneEngine, hand_over
from tests.more import more

NEW_TOKENS = 12
CHUNK = 24  # tokens of a step: longer prompts are read in several
# Around the window, the block and the chunk, and far beyond all of them.
LENGTHS = (5, tiny.WINDOW - 1, tiny.WINDOW, tiny.WINDOW + 1, CHUNK, CHUNK + 1, 61, 64, 130, 199)


def start(model: Path, name: str, block_size: int, transfer: TransferConfig | None, ahead: bool = False) -> OneEngine:
    return OneEngine.start(
        model,
        name,
        block_size,
        transfer,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=CHUNK, async_scheduling=AsyncScheduling.ALWAYS if ahead else AsyncScheduling.NEVER
        ),
        memory_bytes=4 << 20,
        prefix_caching=transfer is not None,
    )


def prompts() -> list[list[int]]:
    """Pairs of prompts with the same beginning: the second one finds it in both nodes' prefix caches."""
    chance = random.Random(5)
    found = []
    for length in LENGTHS:
        prompt = [chance.randrange(3, tiny.VOCAB) for _ in range(length)]
        found += [prompt, prompt[: length * 2 // 3] + [chance.randrange(3, tiny.VOCAB) for _ in range(20)]]
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """The answers of a single engine."""

    @functools.cache
    def answer(architecture: str) -> tuple[Path, list[list[int]]]:
        path = tiny.save(architecture, tmp_path_factory.mktemp("models"))
        alone = start(path, "alone", 4, None)
        given = [alone.answer(f"r{index}", prompt, NEW_TOKENS) for index, prompt in enumerate(prompts())]
        alone.engine.shutdown()
        return path, given

    return answer


CASES = [
    ("mistral-window", "nccl", "push", (4, 4), False),
    ("gemma3", "nixl", "pull", (8, 4), False),
    ("gemma3", "nixl", "push", (4, 8), False),
    ("gpt-oss", "nixl", "push", (4, 4), True),
]
MORE_CASES = [
    *(
        (model, connector, direction, (4, 4), False)
        for model in ("mistral-window", "gemma3", "gpt-oss")
        for connector, direction in (("nixl", "push"), ("nixl", "pull"), ("nccl", "push"), ("nccl", "pull"))
        if (model, connector, direction) != ("mistral-window", "nccl", "push")
    ),
    ("gemma3", "nixl", "push", (8, 4), False),
    ("gemma3", "nixl", "pull", (4, 8), False),
    *(("gemma3", "nixl", direction, (4, 4), True) for direction in ("push", "pull")),
]


@pytest.mark.parametrize(("model", "connector", "direction", "blocks", "ahead"), [*CASES, *more(MORE_CASES)])
def test_the_tokens_are_those_of_one_engine(
    answers: Callable[[str], tuple[Path, list[list[int]]]],
    model: str,
    connector: str,
    direction: str,
    blocks: tuple[int, int],
    ahead: bool,
) -> None:
    """`ahead`: both engines plan a step while the previous one runs."""
    path, expected = answers(model)
    config = TransferConfig(connector=connector, direction=direction)
    producer, consumer = (
        start(path, name, block_size, config, ahead) for name, block_size in zip("pc", blocks, strict=True)
    )
    try:
        for index, (prompt, answer) in enumerate(zip(prompts(), expected, strict=True)):
            tokens = hand_over(producer, consumer, f"r{index}", prompt, NEW_TOKENS)
            assert tokens == answer, f"{len(prompt)} tokens"
        outcomes = consumer.stats().outcomes
        if blocks[0] >= blocks[1]:
            assert set(outcomes) == {"received"}
            assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0
        else:
            # A block of the consumer's may begin before the window, where the producer has given its own up.
            assert outcomes["received"] > len(expected) // 2, outcomes
    finally:
        producer.engine.shutdown()
        consumer.engine.shutdown()
