"""Turns of an agent's job: how a client names them, where they go, and what nodes learn of the tools that they call."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.router.config import PolicyName
from tandem.router.dispatch.lives import REMEMBERED_JOBS, JobHomes
from tandem.router.policy.shortlist import Shortlist
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.test_router_policy import ask, decide, names, node, pools
from tests.router.test_router_shortlist import NOTHING
from tests.small_model import HERMES, WEATHER


def start_pinning(start_router: StartRouter, pairs: int = 1, **settings: Any) -> RunningRouter:
    return start_router(prefill=pairs, decode=pairs, node={"pin_seconds": 60.0}, **settings)


def test_a_job_is_named_by_field_header_or_session(router: RunningRouter) -> None:
    named: list[tuple[dict[str, str], dict[str, Any], tuple[str | None, bool]]] = [
        ({}, {}, (None, False)),
        ({"X-Job-Id": "j", "X-Last-Step": "true"}, {}, ("j", True)),
        ({"X-Job-Id": "other"}, {"job_id": "j", "is_last_step": True}, ("j", True)),
        ({"X-Last-Step": "1"}, {"job_id": "j", "is_last_step": False}, ("j", False)),
        ({"X-Session-Id": "s"}, {}, ("s", False)),
        ({"X-Session-Id": "s", "X-Job-Id": "j"}, {}, ("j", False)),
        ({}, {"prompt_cache_key": "k"}, ("k", False)),
        ({"X-Job-Id": "j"}, {"n": 2}, (None, False)),
    ]
    for headers, fields, expected in named:
        router.as_new()
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
        answer = router.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        submits = [submit for one in router.nodes.values() for submit in one.submits]
        assert {(submit.job_id, submit.is_last_step) for submit in submits} == {expected}


@pytest.mark.parametrize("stream", [False, True])
def test_nodes_that_pin_hear_which_tools_were_called(start_saying: StartRouter, stream: bool):
    router = start_saying("I look. " + HERMES, node={"pin_seconds": 60.0})
    assert router.chat(tools=[WEATHER], stream=stream, job_id="j").status_code == 200
    for there in router.nodes.values():
        there.wait_until(lambda there=there: bool(there.ended_turns), "a word about the turn")  # type: ignore[misc]
        (ended,) = there.ended_turns
        assert (ended.job_id, ended.called) == ("j", ["weather"])
        assert ended.request_id == there.submits[0].request_id


def test_nodes_hear_nothing_of_last_steps_of_other_requests_and_where_nothing_is_pinned(start_router: StartRouter):
    pinning, other = start_pinning(start_router), start_router()
    for fields in ({}, {"job_id": "j", "is_last_step": True}, {"job_id": "j", "n": 2}):
        assert pinning.chat(max_tokens=2, **fields).status_code == 200
    assert other.chat(max_tokens=2, job_id="j").status_code == 200
    assert pinning.chat(max_tokens=2, job_id="the end").status_code == 200
    for there in pinning.nodes.values():
        there.wait_until(lambda there=there: bool(there.ended_turns), "a word about the turn")  # type: ignore[misc]
        assert [ended.job_id for ended in there.ended_turns] == ["the end"]
    assert not any(node.ended_turns for node in other.nodes.values())


def test_the_next_turn_goes_where_the_last_one_is_pinned(start_router: StartRouter):
    router = start_pinning(start_router, pairs=3)
    places = set()
    for turn in range(6):
        answer = router.chat(f"another text in every turn {turn}", max_tokens=2, job_id="j")
        places.add(answer.headers["x-tandem-nodes"])
        if turn:
            assert "its job's last turn is there" in answer.headers["x-tandem-decision"]
    assert len(places) == 1
    (place,) = places
    gone = place.split("decode=")[1]
    router.remove(gone).kill()
    answer = router.chat("and on", max_tokens=2, job_id="j")
    assert answer.status_code == 200
    assert gone not in answer.headers["x-tandem-nodes"]


def test_after_a_last_step_a_job_has_no_home(start_router: StartRouter):
    router = start_pinning(start_router)
    for fields in ({}, {"is_last_step": True}):
        router.chat(max_tokens=2, job_id="j", **fields)
    answer = router.chat(max_tokens=2, job_id="j")
    assert "last turn" not in answer.headers["x-tandem-decision"]


@pytest.mark.parametrize("name", list(PolicyName))
def test_every_policy_sends_a_turn_home(name: PolicyName) -> None:
    nodes = pools(node("p1"), node("p2", waiting_tokens=500), node("d1"), node("d2", running=3))
    home = frozenset({"p2", "d2"})
    assert names(decide(nodes, ask(home=home), name)) == ("p2", "d2")
    assert names(decide(nodes, ask(home=home, avoid=home), name)) == ("p1", "d1")
    assert names(decide(nodes, ask(home=frozenset({"gone"})), PolicyName.LEAST_WAIT)) == ("p1", "d1")
    shortlist = Shortlist()
    for index in range(500):
        shortlist.put(node(f"p{index}"))
        shortlist.put(node(f"d{index}", running=index))
    request = ask(home=frozenset({"p420", "d499"}))
    assert names(decide(shortlist.of(name, request, NOTHING, None), request, name)) == ("p420", "d499")


def test_room_counts_what_is_only_pinned():
    """It gives way: a pinned turn must not keep its own next turn at the router."""
    full = node("d1", running=1, free_blocks=2, pinned_blocks=8)
    assert full.room_blocks == 10
    assert full.has_room(16 * 10)


def test_of_more_jobs_than_are_remembered_the_latest_are() -> None:
    now = 0.0
    homes, pins = JobHomes(lambda: now), msgspec.structs.replace(node("d0").info, pin_seconds=60.0)
    for number in range(REMEMBERED_JOBS + 1):
        homes.remember(f"job {number}", [pins], is_last_step=False)
    assert homes.of("job 0") == frozenset()
    assert homes.of("job 1") == homes.of(f"job {REMEMBERED_JOBS}") == {"d0"}
    now = 60.0
    assert homes.of("job 1") == frozenset(), "its pin has ended"
