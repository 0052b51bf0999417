"""Models whose layers do not all keep all tokens. The recurrent states after the prompt are sent with its keys and values, layers that
read another layer's KV send nothing, and the answer is that of a single engine. The weights are random, and prompts take several chunks."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.kvtransfer.config import ChecksumPolicy, TransferConfig
from tests.engine.model import tiny
from tests.integration.one_engine import PATIENT, OneEngine, hand_over
from tests.more import more

NEW_TOKENS = 8
CHUNK = 24  # tokens of a step
LENGTHS = (1, 4, 5, CHUNK, 61)
_random = random.Random(7)
PROMPTS = [[_random.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
CASES = [
    ("qwen3.5", "nixl", "push", False),
    ("qwen3.5", "nccl", "pull", False),
    ("mamba", "nixl", "push", False),
    ("lfm2", "nixl", "push", True),
    ("llama4", "nixl", "push", False),
    ("deepseek-v3", "nixl", "pull", False),
    ("gemma3n", "nixl", "pull", True),
    ("recurrent-gemma", "nixl", "push", True),
    ("kimi-linear", "nixl", "pull", True),
]
# Other models, and the other direction.
MORE_CASES = [
    ("qwen3.5", "nixl", "pull", False),
    ("qwen3.5", "nccl", "push", False),
    ("qwen3-next", "nixl", "pull", True),
    ("granite-hybrid", "nixl", "push", True),
    ("falcon-h1", "nixl", "pull", True),
    ("minimax", "nixl", "push", True),
    ("zamba", "nixl", "push", True),
]
MORE_CASES += [
    (model, connector, "push" if direction == "pull" else "pull", True)
    for model, connector, direction, _ in [*CASES, *MORE_CASES]
    if model not in ("qwen3.5", "mamba", "lfm2")
]

Answers = Callable[[str], tuple[Path, list[list[int]]]]


def start(
    model: Path,
    name: str,
    transfer: TransferConfig | None,
    *,
    ahead: bool,
    block_size: int = 4,
    prefix_caching: bool = False,
) -> OneEngine:
    return OneEngine.start(
        model,
        name,
        block_size,
        transfer,
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=CHUNK,
            max_model_len=96,
            async_scheduling=AsyncScheduling.ALWAYS if ahead else AsyncScheduling.NEVER,
        ),
        memory_bytes=4 << 20,
        prefix_caching=prefix_caching,
        checkpoint_tokens=8,
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers of a single engine."""

    @functools.cache
    def answer(architecture: str) -> tuple[Path, list[list[int]]]:
        path = tiny.save(architecture, tmp_path_factory.mktemp("models"))
        with start(path, "alone", None, ahead=False) as alone:
            return path, [alone.answer(f"r{index}", prompt, NEW_TOKENS) for index, prompt in enumerate(PROMPTS)]

    return answer


@pytest.mark.parametrize(("model", "connector", "direction", "ahead"), [*CASES, *more(MORE_CASES)])
def test_the_answer_is_that_of_one_engine(
    model: str, connector: str, direction: str, ahead: bool, answers: Answers
) -> None:
    """Every block that travels carries a checksum. No token of a prompt is computed twice. Latents go between blocks of two sizes."""
    path, expected = answers(model)
    transfer = TransferConfig(**PATIENT | {"connector": connector}, direction=direction, checksums=ChecksumPolicy.ALL)  # type: ignore[arg-type]
    size = 8 if model == "deepseek-v3" else 4
    with (
        start(path, f"p-{model}-{connector}-{direction}", transfer, ahead=ahead) as producer,
        start(path, f"c-{model}-{connector}-{direction}", transfer, ahead=ahead, block_size=size) as consumer,
    ):
        # States of others lie in the blocks that the prompts get.
        for engine in (producer, consumer):
            engine.answer("before", [9, 8, 7, 6, 5], 3)
        computed = consumer.engine.scheduler.stats().prompt_tokens_computed
        for index, prompt in enumerate(PROMPTS):
            found = hand_over(producer, consumer, f"r{index}", prompt, NEW_TOKENS)
            assert found == expected[index], f"prompt of {len(prompt)} tokens"
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == computed
        assert producer.stats().outcomes == {"sent": len(LENGTHS)}
        assert consumer.stats().outcomes == {"received": len(LENGTHS)}
        expect_all_free(producer, consumer)


def expect_all_free(*engines: OneEngine) -> None:
    for engine in engines:
        engine.engine.scheduler.check_integrity()
        stats = engine.engine.scheduler.stats()
        assert stats.free_blocks == stats.total_blocks


@pytest.mark.parametrize(
    ("model", "direction"), [("qwen3.5", "push"), ("recurrent-gemma", "pull"), *more([("mamba", "push")])]
)
def test_a_conversation_goes_on_from_states_that_were_kept(model: str, direction: str, answers: Answers) -> None:
    """On the prefill node, where the last turn's prompt was read, and on a decode node that has read it once itself: the states of the
    handover are those that count."""
    path, _ = answers(model)
    transfer = TransferConfig(direction=direction, checksums=ChecksumPolicy.ALL)  # type: ignore[arg-type]
    with (
        start(path, f"alone-{model}", None, ahead=False) as alone,
        start(path, f"p-turns-{model}", transfer, ahead=True, prefix_caching=True) as producer,
        start(path, f"c-turns-{model}", transfer, ahead=False, prefix_caching=True) as consumer,
    ):
        conversation = PROMPTS[-1][:40]
        assert consumer.answer("before", conversation, 3) == alone.answer("before", conversation, 3)
        for turn in range(3):
            expected = alone.answer(f"t{turn}", conversation, NEW_TOKENS)
            assert hand_over(producer, consumer, f"t{turn}", conversation, NEW_TOKENS) == expected
            conversation = [*conversation, *expected, 5 + turn]
        engines = (alone, producer, consumer)
        assert [engine.engine.scheduler.stats().prompt_tokens_cached for engine in engines] == [0, 36 + 48, 3 * 36]
        expect_all_free(*engines)


@pytest.mark.parametrize(
    ("direction", "produced", "block_size"), [("push", 4, 4), ("push", 1, 8), *more([("pull", 4, 4)])]
)
def test_a_state_that_cannot_be_taken_is_not_handed_over(
    direction: str, produced: int, block_size: int, answers: Answers
) -> None:
    """The producer goes on after the prompt, which no prefill node does, and its state is that of a later token; or blocks have two
    sizes, and a state's bytes lie in the order of its own. The decode node reads the prompt itself."""
    path, expected = answers("lfm2")
    transfer = TransferConfig(direction=direction, timeout_s=2.0, handshake_timeout_s=2.0)  # type: ignore[arg-type]
    with (
        start(path, f"p-{direction}-{block_size}", transfer, ahead=False) as producer,
        start(path, f"c-{direction}-{block_size}", transfer, ahead=False, block_size=block_size) as consumer,
    ):
        assert hand_over(producer, consumer, "r", PROMPTS[-1], NEW_TOKENS, produced=produced) == expected[-1]
        assert "received" not in consumer.stats().outcomes
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == LENGTHS[-1]
        expect_all_free(producer, consumer)
