"""The record of the last ten minutes is bounded, and right about which requests were slow and why."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.recent import (
    BUCKET_S,
    LATEST,
    SLOWEST,
    WINDOW_S,
    RecentRequests,
    RequestAccount,
    Targets,
    cause_of,
    parts_of,
)
from tandem.wire.nodes import PoolReport, Role
from tests.clock import Clock
from tests.router.conftest import StartRouter

TARGETS = Targets(ttft_s=2.0, inter_token_s=0.1)
QUICK = RequestAccount(
    request_id="r", ended_at=0.0, reading_s=0.01, router_wait_s=0.0, node_wait_s=0.02, prefill_s=0.2, handover_s=0.01,
    decode_s=0.5, prompt_tokens=100, cached_tokens=0, output_tokens=11, longest_gap_s=0.06, prefill_node="p0",
    decode_node="d0", decision="", preemptions=0, failovers=0, finish="stop", traced=False,
)  # fmt: skip


def account(**fields: object) -> RequestAccount:
    return msgspec.structs.replace(QUICK, **fields)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"router_wait_s": 5.0}, "the router's line"),
        ({"node_wait_s": 5.0}, "a node's line"),
        ({"prefill_s": 5.0}, "computing the prompt"),
        ({"handover_s": 9.0}, "the handover"),
        ({"decode_s": 9.0}, "writing the answer"),
        ({"decode_s": 9.0, "longest_gap_s": 8.0}, "one gap in its answer"),
        ({"decode_s": 9.0, "preemptions": 1}, "it lost its blocks and was computed again"),
        ({"prefill_s": 5.0, "failovers": 1}, "it moved to another node"),
        ({"output_tokens": 0, "finish": "error"}, "it failed"),
        ({"decode_s": 9.0, "failovers": 2, "finish": "error"}, "it failed"),
    ],
)
def test_a_slow_request_has_a_cause(fields: dict[str, object], cause: str) -> None:
    assert cause_of(account(**fields), TARGETS) == cause


def test_what_is_in_time_is_counted_by_both_targets() -> None:
    recent = RecentRequests(TARGETS, Clock(1000.0))
    recent.ended(account())
    recent.ended(account(prefill_s=3.0))
    recent.ended(account(decode_s=5.0))
    recent.ended(account(output_tokens=0, finish="error"))
    recent.ended(account(finish="error"))
    [moment] = recent.moments()
    assert (moment.ended, moment.failed, moment.first_in_time, moment.tokens_in_time) == (5, 2, 2, 2)


def test_what_whole_answers_took_is_told_for_a_time() -> None:
    clock = Clock(1000.0)
    recent = RecentRequests(TARGETS, clock)
    recent.ended(account(request_id="early", ended_at=1000.0))
    recent.ended(account(request_id="left", ended_at=1050.0, finish="abort"))
    recent.ended(account(request_id="failed", ended_at=1050.0, output_tokens=0, finish="error"))
    recent.ended(account(request_id="late", ended_at=1050.0))
    clock.now = 1060.0
    (one,) = recent.measured(30.0)
    assert (one.request_id, one.ended_ago_s) == ("late", 10.0)
    assert (one.first_token_s, one.total_s) == pytest.approx((0.23, 0.74))
    assert one.token_s == pytest.approx(0.051)


def test_a_request_that_failed_for_want_of_another_node_did_not_move() -> None:
    recent = RecentRequests(TARGETS, Clock(1000.0))
    recent.ended(account(failovers=1, finish="error"))
    recent.ended(account(failovers=1))
    [moment] = recent.moments()
    assert (moment.failed, moment.moved) == (1, 1)
    assert [one.what for one in recent.troubles()] == ["moved"]


def test_a_node_that_is_left_out_in_the_end_is_said_to_be() -> None:
    recent = RecentRequests(TARGETS, Clock(1000.0))
    for _ in range(2):
        recent.pools_are([PoolReport(Role.DECODE, 1, down={"d0": "its process ended"})])
    for _ in range(2):
        recent.pools_are([PoolReport(Role.DECODE, 1, left_out={"d0": "no weights"})])
    said = [(one.code, one.node, one.text, one.count) for one in recent.troubles()]
    assert said == [("left_out", "d0", "no weights", 1), ("down", "d0", "its process ended", 1)]
    assert sum(moment.restarts for moment in recent.moments()) == 1


def test_time_passes_also_without_requests_and_what_is_old_goes() -> None:
    clock = Clock(1000.0)
    recent = RecentRequests(TARGETS, clock)
    recent.ended(account(request_id="old", prefill_s=50.0))
    clock.now += 3 * BUCKET_S
    assert [moment.ended for moment in recent.moments()] == [1, 0, 0, 0]
    clock.now += WINDOW_S
    recent.sample(7, 2)
    recent.sample(3, 5)
    assert not recent.slowest(9)
    assert (recent.moments()[-1].running, recent.moments()[-1].queued) == (7, 5)


def test_a_client_that_went_away_made_its_own_request_slow_or_not() -> None:
    recent = RecentRequests(TARGETS, Clock(1000.0))
    recent.ended(account(prefill_s=50.0, finish="abort"))
    assert not recent.slowest(9)


@given(times=st.lists(st.tuples(st.floats(0, 40), st.floats(0, 9)), max_size=400))
def test_what_is_kept_is_bounded_and_the_slowest_of_all_is_among_it(times: list[tuple[float, float]]) -> None:
    clock = Clock(1000.0)
    recent = RecentRequests(TARGETS, clock)
    seen: list[tuple[float, float]] = []
    for passes, prefill_s in times:
        clock.now += passes
        one = account(prefill_s=prefill_s)
        recent.ended(one)
        seen.append((clock.now, TARGETS.excess(one)))
    assert len(recent.latest()) <= LATEST
    assert len(recent.moments()) <= WINDOW_S / BUCKET_S
    found = recent.slowest(5)
    assert len(found) <= min(5, SLOWEST * len(recent.moments()))
    assert [slow.excess for slow in found] == sorted((slow.excess for slow in found), reverse=True)
    if seen:
        oldest = recent.moments()[0].began
        assert found[0].excess == max(excess for at, excess in seen if at >= oldest)


def test_a_routers_request_adds_up(start_router: StartRouter) -> None:
    router = start_router()
    router.nodes["p0"].set(queue_s=0.00001)
    router.complete(headers={"x-request-id": "mine"}, max_tokens=4)
    recent = router.server.services.dispatcher.recent
    [one] = router.look(recent.latest)
    assert (one.request_id, one.prefill_node, one.decode_node, one.output_tokens) == ("mine", "p0", "d0", 4)
    assert all(seconds >= 0 for _, seconds in parts_of(one))
    assert sum(seconds for _, seconds in parts_of(one)) == pytest.approx(one.total_s)
    assert one.node_wait_s == 0.00001
    assert router.look(lambda: recent.slowest(3))[0].account == one
