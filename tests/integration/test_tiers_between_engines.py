"""Nodes with transfers and tiers: KV that a prefill node loads from its tier reaches the decode node like KV that it computes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tandem.kvtransfer.config import TierConfig, TransferConfig
from tests.engine.model.tiny import save
from tests.integration.one_engine import PATIENCE_S, OneEngine, hand_over
from tests.more import more

NEW_TOKENS = 8


@pytest.mark.parametrize(
    ("kind", "direction"), [("llama", "push"), ("qwen3.5", "pull"), *more([("llama", "pull"), ("qwen3.5", "push")])]
)
def test_a_prompt_from_a_tier_is_handed_over_like_one_that_was_computed(
    tmp_path: Path, kind: str, direction: str
) -> None:
    """With push, blocks are sent when they count as computed. A producer that did not count what its tier had loaded never
    sent the last of them, and the decode node computed the prompt again after `timeout_s`."""
    model = save(kind, tmp_path)
    tiers = [TierConfig(cpu=4 << 20)]
    config = TransferConfig(connector="nixl", direction=direction, timeout_s=20)
    options: dict[str, Any] = {"memory_bytes": 8 << 20, "prefix_caching": True, "checkpoint_tokens": 4}
    with (
        OneEngine.start(model, "alone", 4, None, **options) as alone,
        OneEngine.start(model, "p", 4, config, tiers=tiers, **options) as producer,
        OneEngine.start(model, "c", 4, config, tiers=tiers, **options) as consumer,
    ):
        prompt = [3 + 7 * i % 120 for i in range(70)]
        expected = alone.answer("a", prompt, NEW_TOKENS)
        for turn in range(3):
            assert hand_over(producer, consumer, f"r{turn}", prompt, NEW_TOKENS) == expected
            for node in (producer, consumer):
                until = time.monotonic() + PATIENCE_S
                while node.engine.scheduler.stats().held_blocks:
                    node.run("the end of the copies", [], until)
                node.engine.scheduler.state.cache.reset_prefix_cache()
        read, received = producer.engine.scheduler.stats(), consumer.engine.scheduler.stats()
        assert (read.prompt_tokens_computed, read.prompt_tokens_loaded) == (70 + 2 * 2, 2 * 68)
        assert (received.prompt_tokens_received, received.prompt_tokens_computed) == (3 * 70, 0)
        assert received.loads_failed == 0
        # The decode node keeps the answer as well, and goes on from it by itself. Of states it has none: it read no prompt.
        kept = 76 if kind == "llama" else 0
        computed = received.prompt_tokens_computed
        follow_up = [*prompt, *expected, 9, 9]
        assert consumer.answer("b", follow_up, 3) == alone.answer("b", follow_up, 3)
        received = consumer.engine.scheduler.stats()
        assert received.prompt_tokens_loaded == kept
        assert received.prompt_tokens_computed - computed == len(follow_up) - kept
