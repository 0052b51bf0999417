"""A rank of a node whose ranks are processes with their own heads or layers ends or hangs while blocks are being sent.

Slow: each process imports torch and NIXL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from test_connector_contract import LEASE_S, Pair, a_prompt, started

from tests.waiting import until

pytestmark = pytest.mark.slow

BLOCKS = 63
WIDE = {"ranks": 2, "checksums": "all"}
STAGED = WIDE | {"cuts": (1,)}


@pytest.fixture(params=["push", pytest.param("pull", marks=pytest.mark.more)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with started(("nixl", request.param), WIDE, WIDE) as both:
        tokens = a_prompt(40)
        both.expect_loaded(both.add(tokens), tokens)
        both.expect_nothing_left()
        yield both


@pytest.fixture(params=[pytest.param(WIDE, id="heads", marks=pytest.mark.more), pytest.param(STAGED, id="layers")])
def pushing(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with started(("nixl", "push"), request.param, WIDE) as both:
        tokens = a_prompt(40)
        both.expect_loaded(both.add(tokens), tokens)
        yield both


def until_sent(pair: Pair, blocks: int) -> None:
    def has_sent() -> bool:
        pair.producer.call("step")
        return bool(pair.producer.call("stats").blocks_sent >= blocks)

    until(has_sent)


def test_a_rank_of_the_producer_that_is_killed_fails_the_transfer_and_leaks_nothing(pushing: Pair) -> None:
    name = pushing.add(a_prompt(80), producer={"chunk": 8})
    pushing.consumer.call("step")
    pushing.until_registered()
    until_sent(pushing, 10 + 6)
    pushing.producer.call("kill_rank", 1)
    pushing.consumer.begin("run_until", name, ["failed", "loaded"], timeout_s=LEASE_S + 8)
    pushing.producer.call("run_until", name, ["ended", "freed"])
    assert pushing.consumer.result() == "failed"
    assert "rank 1 of this node has ended" in pushing.consumer.call("failure", name)
    assert pushing.consumer.call("kv_is_right", name), "what it says is there for good is right"
    pushing.consumer.call("finish", name)
    # The node ends as one. What its ranks had written to is known to be safe then.
    pushing.producer.kill()
    pushing.consumer.call("run_until_free", BLOCKS, timeout_s=LEASE_S + 8)
    pushing.producer = pushing.start("p")
    tokens = a_prompt(40)
    pushing.expect_loaded(pushing.add(tokens), tokens)


def test_a_write_of_a_rank_that_was_killed_in_the_middle_is_not_called_over(pushing: Pair) -> None:
    """It is stopped before the write is posted, and killed while it is owed: so the consumer keeps the blocks until the node has ended."""
    name = pushing.add(a_prompt(80), producer={"chunk": 8})
    pushing.producer.call("stop_rank", 1)
    pushing.consumer.call("step")
    pushing.until_registered()
    for _ in range(4):
        pushing.producer.call("step")
    pushing.producer.call("kill_rank", 1)
    pushing.consumer.begin("run_until", name, ["failed", "loaded"], timeout_s=LEASE_S + 8)
    for _ in range(4):
        pushing.producer.call("step")
    assert pushing.consumer.result() == "failed"
    assert "rank 1 of this node has ended" in pushing.consumer.call("failure", name)
    assert pushing.consumer.call("num_quarantined") > 0
    pushing.consumer.call("finish", name)
    pushing.producer.kill()
    pushing.consumer.call("run_until_free", BLOCKS, timeout_s=LEASE_S + 8)
    pushing.producer = pushing.start("p")


def test_blocks_that_a_rank_may_write_to_wait_for_its_end_too(pushing: Pair) -> None:
    """Rank 0 has ended, and another rank stands still with a write to do."""
    name = pushing.add(a_prompt(80), producer={"chunk": 8})
    other = pushing.producer.call("rank_pid", 1)
    pushing.producer.call("stop_rank", 1)
    pushing.consumer.call("step")
    pushing.until_registered()
    for _ in range(4):
        pushing.producer.call("step")
    pushing.producer.kill()
    pushing.consumer.call("run_until", name, ["failed"], timeout_s=LEASE_S + 8)
    pushing.consumer.call("finish", name)
    pushing.consumer.call("run_until_accounted_for", BLOCKS)
    with pytest.raises(AssertionError, match="TimeoutError"):
        pushing.consumer.call("run_until_free", BLOCKS, timeout_s=2.0)  # four times what an end is given
    os.kill(other, signal.SIGKILL)
    pushing.consumer.call("run_until_free", BLOCKS, timeout_s=LEASE_S + 8)
    pushing.producer = pushing.start("p")


def test_a_rank_of_the_consumer_that_is_killed_frees_the_producer(pair: Pair) -> None:
    name = pair.add(a_prompt(80), producer={"chunk": 8})
    pair.consumer.call("step")
    pair.producer.call("step")
    pair.consumer.call("kill_rank", 1)
    pair.producer.call("step")
    pair.consumer.kill()
    pair.producer.call("run_until", name, ["freed"], timeout_s=LEASE_S + 4)
    assert pair.producer.call("num_free") == BLOCKS
    pair.consumer = pair.start("c")
    tokens = a_prompt(40)
    pair.expect_loaded(pair.add(tokens), tokens)


def test_a_rank_that_stands_still_is_waited_for_and_nothing_is_believed_before(pair: Pair) -> None:
    tokens = a_prompt(48)
    writer = pair.producer if pair.options["p"]["direction"] == "push" else pair.consumer
    writer.call("stop_rank", 1)
    name = pair.add(tokens)
    pair.consumer.call("step")
    for _ in range(20):
        pair.producer.call("step")
        pair.consumer.call("step")
    assert pair.consumer.call("state", name) == "waiting_for_kv"
    writer.call("resume_rank", 1)
    pair.expect_loaded(name, tokens)
    pair.expect_nothing_left()
