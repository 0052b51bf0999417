"""Conditional P/D decides by measured rates, not by a constant."""

from __future__ import annotations

from tandem.router.config import LocalPrefill
from tandem.router.policy.views import PoolSnapshot
from tests.router.test_router_policy import ask, decide, names, node, pools


def goes_local(snapshot: PoolSnapshot, tokens: int, **request: object) -> bool:
    return names(decide(snapshot, ask(tokens, **request), local=LocalPrefill.AUTO))[0] is None


def test_until_everything_is_measured_prompts_are_sent_away() -> None:
    assert not goes_local(pools(node("p0"), node("d0"), handover=None), 5)
    assert not goes_local(pools(node("p0", rate=None), node("d0", rate=None), handover=0.01), 5)


def test_a_short_prompt_is_read_where_a_handover_costs_more() -> None:
    snapshot = pools(node("p0", rate=1000), node("d0", rate=1000, running=1), handover=0.05)
    assert goes_local(snapshot, 40)
    assert not goes_local(snapshot, 400)


def test_the_line_moves_with_the_handover() -> None:
    fast = pools(node("p0"), node("d0", running=1), handover=0.001)
    slow = pools(node("p0"), node("d0", running=1), handover=0.2)
    assert not goes_local(fast, 40)
    assert goes_local(slow, 40)


def test_the_line_moves_with_the_streams_that_would_stall() -> None:
    assert goes_local(pools(node("p0"), node("d0", running=1), handover=0.05), 40)
    assert not goes_local(pools(node("p0"), node("d0", running=30), handover=0.05), 40)


def test_the_line_moves_with_the_prefill_nodes_queue() -> None:
    quiet = pools(node("p0"), node("d0", running=2), handover=0.01)
    crowded = pools(node("p0", waiting_tokens=5000), node("d0", running=2), handover=0.01)
    assert not goes_local(quiet, 40)
    assert goes_local(crowded, 40)


def test_no_line_is_so_long_that_streams_stand_still_for_a_prompt() -> None:
    crowded = node("p0", waiting_tokens=50_000)
    assert goes_local(pools(crowded, node("d0"), handover=0.01), 500)  # no request is being decoded
    assert not goes_local(pools(crowded, node("d0", running=1), handover=0.01), 500)
    assert not goes_local(pools(crowded, node("d0", waiting=1), handover=0.01), 500)
    assert goes_local(pools(crowded, node("d0", running=1, rate=100_000), handover=0.01), 500)


def test_a_long_prompt_that_is_cached_on_the_decode_node_is_short() -> None:
    snapshot = pools(node("p0"), node("d0", running=3), handover=0.02)
    assert not goes_local(snapshot, 2000)
    assert goes_local(snapshot, 2000, cached={"d0": 1990})


def test_a_decode_nodes_own_rate_is_believed_before_its_peers() -> None:
    slow = pools(node("p0", rate=10_000), node("d0", rate=100, running=1), handover=0.05)
    unknown = pools(node("p0", rate=10_000), node("d0", rate=None, running=1), handover=0.05)
    assert not goes_local(slow, 100)
    assert goes_local(unknown, 100)


def test_the_decision_says_what_it_compared() -> None:
    decision = decide(pools(node("p0"), node("d0"), handover=0.05), ask(40), local=LocalPrefill.AUTO)
    assert "40 uncached tokens cost 40 ms here and 90 ms sent to p0" in decision.reason
