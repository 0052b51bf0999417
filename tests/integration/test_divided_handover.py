"""Nodes whose ranks read prompts together hand over to nodes of any width, and take from them, through real engines and NIXL."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

import pytest

from tandem.engine.config import SchedulerConfig
from tandem.engine.model.divided import division
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tests.engine.model import tiny
from tests.integration.one_engine import PATIENT, OneEngine, hand_over_all
from tests.more import more

CHUNK = 48


@pytest.fixture
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "LEAST_ROWS", 2)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("divided"))


ONE: dict[str, Any] = {}
TWO: dict[str, Any] = {"width": 2, "contexts": 2}
APART = TWO | {"apart": True}
TENSOR: dict[str, Any] = {"width": 2}
BOTH = {"width": 4, "contexts": 2, "apart": True}  # two of two ranks that share matrices
PAIRS = [
    ("push", TWO, ONE, 4),
    ("pull", APART, TENSOR | {"apart": True}, 8),
    ("push", ONE, BOTH, 4),
    *more([("pull", TWO, TENSOR, 8), ("push", BOTH, TENSOR | {"apart": True}, 4), ("push", APART, TENSOR, 8)]),
    *more([("pull", ONE, APART, 4), ("push", APART, ONE, 4), ("push", TENSOR, TWO, 8), ("pull", BOTH, APART, 8)]),
]  # fmt: skip


@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize(("direction", "reads", "writes", "block_size"), PAIRS)
def test_nodes_of_unlike_widths_hand_over(
    direction: Literal["push", "pull"], reads: dict[str, Any], writes: dict[str, Any], block_size: int, tiny_llama: Path
) -> None:
    """In uneven chunks; the second prompt begins as the first does, and no cache has any of the third."""
    prompts = [[(11 * token + which // 2) % 90 + 3 for token in range(61 + 40 * which)] for which in range(3)]
    expected = [found.tokens for found in tiny.reference(tiny_llama, prompts, 8)]
    transfer = TransferConfig(**PATIENT, direction=direction, checksums="all")  # type: ignore[arg-type]
    with contextlib.ExitStack() as both:
        engines = []
        for name, size, width in (("p", 4, reads), ("c", block_size, writes)):
            scheduler = SchedulerConfig(max_num_batched_tokens=CHUNK)
            engine = OneEngine.start(
                tiny_llama, name, size, transfer, scheduler=scheduler, memory_bytes=8 << 20, prefix_caching=True, **width
            )  # fmt: skip
            engines.append(both.enter_context(engine))
        producer, consumer = engines
        hand_over_all(producer, consumer, prompts, expected)
        hits = producer.engine.scheduler.stats()
        assert hits.prompt_tokens_computed < sum(map(len, prompts)), "the second prompt's beginning was cached"


@pytest.mark.more
def test_ranks_on_two_machines_read_together(tiny_llama: Path) -> None:
    """Processes of a real node, each with a cache of its own."""
    prompts = [[(11 * token + which) % 90 + 3 for token in range(150)] for which in range(2)]
    expected = [found.tokens for found in tiny.reference(tiny_llama, prompts, 8)]
    transfer = TransferConfig(**PATIENT, checksums="all")  # type: ignore[arg-type]
    with (
        OneEngine.start(
            tiny_llama, "p", 4, transfer, memory_bytes=8 << 20, prefix_caching=True, processes=True, machines=2, **TWO
        ) as producer,
        OneEngine.start(tiny_llama, "c", 4, transfer, memory_bytes=4 << 20, **TENSOR) as consumer,
    ):  # fmt: skip
        hand_over_all(producer, consumer, prompts, expected)
        assert len(producer.far[0].ranks) == 1


@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize("apart", [True, *more([False])])
def test_requests_that_lose_their_blocks_read_their_prompts_again(apart: bool, tiny_llama: Path) -> None:
    prompts = [[(11 * token + which) % 90 + 3 for token in range(40)] for which in range(4)]
    expected = [found.tokens for found in tiny.reference(tiny_llama, prompts, 24)]
    scheduler = SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=4)
    with OneEngine.start(
        tiny_llama, "n", 4, None, scheduler=scheduler, memory_bytes=8 << 20, num_blocks=50, apart=apart, **TWO
    ) as engine:
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, 24, None)
        assert engine.run_all() == {str(index): answer for index, answer in enumerate(expected)}
        assert engine.engine.scheduler.stats().preemptions > 0


@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize("apart", [False, *more([True])])
def test_what_left_the_cache_comes_back_from_a_tier(apart: bool, tiny_llama: Path) -> None:
    prompts = [[(11 * token + which) % 90 + 3 for token in range(60)] for which in range(4)]
    expected = [found.tokens for found in tiny.reference(tiny_llama, prompts, 8)]
    transfer, tiers = TransferConfig(connector="nixl"), [TierConfig(cpu=16 << 20)]
    with OneEngine.start(
        tiny_llama, "n", 4, transfer, memory_bytes=8 << 20, num_blocks=30, prefix_caching=True, apart=apart, tiers=tiers, **TWO
    ) as engine:  # fmt: skip
        for turn in ("first", "again"):
            for index, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
                assert engine.answer(f"{turn}-{index}", prompt, 8) == answer
        assert engine.engine.scheduler.stats().prompt_tokens_loaded > 0
