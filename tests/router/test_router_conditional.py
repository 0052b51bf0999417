"""Conditional P/D decides by measured rates, not by a constant."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.config import LocalPrefill
from tandem.router.policy.views import PoolSnapshot
from tests.router.test_router_policy import ask, decide, names, node, pools


def goes_local(snapshot: PoolSnapshot, tokens: int, **request: object) -> bool:
    return names(decide(snapshot, ask(tokens, **request), local=LocalPrefill.AUTO))[0] is None


def one_of_each(handover: float | None, decode: dict[str, Any], **prefill: Any) -> PoolSnapshot:
    return pools(node("p0", **prefill), node("d0", **decode), handover=handover)


BUSY = {"running": 1}


@pytest.mark.parametrize(
    ("away", "local"),
    [
        ((one_of_each(0.05, BUSY), 400), (one_of_each(0.05, BUSY), 40)),
        ((one_of_each(0.001, BUSY), 40), (one_of_each(0.2, BUSY), 40)),
        ((one_of_each(0.05, {"running": 30}), 40), (one_of_each(0.05, BUSY), 40)),
        ((one_of_each(0.01, {"running": 2}), 40), (one_of_each(0.01, {"running": 2}, waiting_tokens=5000), 40)),
        ((one_of_each(0.02, {"running": 3}), 2000), (one_of_each(0.02, {"running": 3}), 2000, {"d0": 1990})),
        ((one_of_each(0.05, BUSY | {"rate": 100}, rate=1e4), 100), (one_of_each(0.05, BUSY | {"rate": None}, rate=1e4), 100)),
    ],
    ids=["the prompt", "the handover", "streams that would stall", "the prefill node's queue", "what is cached", "its own rate, or its peers'"],
)  # fmt: skip
def test_the_line_moves_with(away: tuple[PoolSnapshot, int], local: tuple[Any, ...]) -> None:
    assert not goes_local(*away)
    assert goes_local(local[0], local[1], cached=local[2] if local[2:] else {})


def test_until_everything_is_measured_prompts_are_sent_away() -> None:
    assert not goes_local(one_of_each(None, {}), 5)
    assert not goes_local(one_of_each(0.01, {"rate": None}, rate=None), 5)


def test_no_line_is_so_long_that_streams_stand_still_for_a_prompt() -> None:
    crowded = node("p0", waiting_tokens=50_000)
    assert goes_local(pools(crowded, node("d0"), handover=0.01), 500)  # no request is being decoded
    assert not goes_local(pools(crowded, node("d0", running=1), handover=0.01), 500)
    assert not goes_local(pools(crowded, node("d0", waiting=1), handover=0.01), 500)
    assert goes_local(pools(crowded, node("d0", running=1, rate=100_000), handover=0.01), 500)


def test_the_decision_says_what_it_compared() -> None:
    decision = decide(pools(node("p0"), node("d0"), handover=0.05), ask(40), local=LocalPrefill.AUTO)
    assert "40 uncached tokens cost 40 ms here and 90 ms sent to p0" in decision.reason
