from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.node.live_requests import LiveRequests
from tandem.wire.requests import Submit
from tandem.wire.sampling import SamplingParams

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 9), st.integers(1, 50)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("pass"), st.just(0), st.integers(1, 20)),
    ),
    max_size=60,
)


def submit(name: str, timeout_s: float, reply_to: str = "router") -> Submit:
    return Submit(name, reply_to, [1], SamplingParams(max_tokens=1), timeout_s)


@given(STEPS)
def test_each_request_that_is_late_is_named_once_and_no_other(steps: list[tuple[str, int, int]]) -> None:
    live, now, deadlines = LiveRequests(), 0.0, dict[str, float]()
    for kind, number, amount in steps:
        name = str(number)
        if kind == "begin" and name not in deadlines:
            live.begin(submit(name, amount), now)
            deadlines[name] = now + amount
        elif kind == "end":
            assert (live.end(name) is not None) == (deadlines.pop(name, None) is not None)
        elif kind == "pass":
            due = live.seconds_until_due(now)
            assert due == (min(deadlines.values()) - now if deadlines else None)
            now += amount
            late = []
            for request in live.overdue(now):
                late.append(request.submit.request_id)
                live.end(request.submit.request_id)
            assert sorted(late) == sorted(name for name, deadline in deadlines.items() if deadline <= now)
            for name in late:
                del deadlines[name]
        assert {request.submit.request_id for request in live} == set(deadlines)


def test_a_request_has_one_owner() -> None:
    live = LiveRequests()
    live.begin(submit("a", 1, "one"), 0.0)
    live.begin(submit("b", 1, "two"), 0.0)
    assert live.is_owner("a", "one")
    assert not live.is_owner("a", "two")
    assert not live.is_owner("c", "one")
    assert [request.submit.request_id for request in live.of_router("two")] == ["b"]


def test_deadlines_of_requests_that_ended_do_not_pile_up() -> None:
    live = LiveRequests()
    live.begin(submit("lasts", 50_000), 0.0)
    for index in range(10_000):
        live.begin(submit(str(index), 1800), float(index))
        live.end(str(index))
    assert len(live._deadlines) < 200
    assert [request.submit.request_id for request in live.overdue(50_000.0)] == ["lasts"]
