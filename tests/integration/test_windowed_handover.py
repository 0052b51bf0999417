"""Models with sliding windows: each node frees the blocks before the window at its own time, and the answer is that of a single engine.
The weights are random, so that KV at a wrong position changes the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.kvtransfer.config import TransferConfig
from tests.engine.model import tiny
from tests.integration.one_engine import PATIENT, OneEngine, hand_over, hand_over_all, prompts_in_pairs
from tests.more import more

NEW_TOKENS = 8
CHUNK = 24  # tokens of a step: longer prompts are read in several
# Around the window, the block and the chunk, and far beyond all of them.
LENGTHS = (5, tiny.WINDOW - 1, tiny.WINDOW, tiny.WINDOW + 1, CHUNK, CHUNK + 1, 61, 199)
PROMPTS = prompts_in_pairs(LENGTHS, tiny.VOCAB)
Answers = Callable[[str], tuple[Path, list[list[int]]]]


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


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers of a single engine."""

    @functools.cache
    def answer(architecture: str) -> tuple[Path, list[list[int]]]:
        path = tiny.save(architecture, tmp_path_factory.mktemp("models"))
        with start(path, "alone", 4, None) as alone:
            return path, [alone.answer(f"r{index}", prompt, NEW_TOKENS) for index, prompt in enumerate(PROMPTS)]

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
    answers: Answers, model: str, connector: str, direction: str, blocks: tuple[int, int], ahead: bool
) -> None:
    """`ahead`: both engines plan a step while the previous one runs."""
    path, expected = answers(model)
    config = TransferConfig(**PATIENT | {"connector": connector}, direction=direction)
    with start(path, "p", blocks[0], config, ahead) as producer, start(path, "c", blocks[1], config, ahead) as consumer:
        if blocks[0] >= blocks[1]:
            hand_over_all(producer, consumer, PROMPTS, expected)
            return
        for index, (prompt, answer) in enumerate(zip(PROMPTS, expected, strict=True)):
            assert hand_over(producer, consumer, f"r{index}", prompt, NEW_TOKENS) == answer, f"{len(prompt)} tokens"
        # A block of the consumer's may begin before the window, where the producer has given its own up.
        outcomes = consumer.stats().outcomes
        assert outcomes["received"] > len(expected) // 2, outcomes
