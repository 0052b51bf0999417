"""Nodes of an earlier version than a request's: they get those that ask for nothing new, and no message that they could not read."""

from __future__ import annotations

import pytest

from tandem.base.errors import Unavailable
from tandem.router.links import NodeLinks
from tandem.wire import versions
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import Ping, Submit, TurnEnded
from tandem.wire.sampling import SamplingParams
from tandem.wire.versions import WIRE_VERSION, needed_version
from tests.router.conftest import RunningRouter, StartRouter
from tests.wire.members import endpoint_at

OLD = WIRE_VERSION - 1


@pytest.fixture(autouse=True)
def of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a field and a message had come with it."""
    since = {"SamplingParams.min_tokens": WIRE_VERSION, "TurnEnded": WIRE_VERSION}
    monkeypatch.setattr(versions, "SINCE", since)


def submit(**sampling: int) -> Submit:
    return Submit("r", "tcp://x:1", 10.0, prompt_token_ids=[1, 2, 3], sampling=SamplingParams(**sampling))


@pytest.fixture
def router(start_router: StartRouter) -> RunningRouter:
    """Before a cluster goes over to this version: two nodes of the one before."""
    return start_router(node={"wire_version": OLD})


def test_what_a_message_needs_is_read_off_the_fields_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SINCE", {"SamplingParams.min_tokens": 7, "TurnEnded": 8, "Submit.media": 9})
    assert needed_version(submit()) == 0
    assert needed_version(submit(min_tokens=0)) == 0, "a default is left out"
    assert needed_version(submit(min_tokens=1)) == 7
    assert needed_version(TurnEnded("tcp://x:1", "r", "j", None)) == 8
    assert needed_version(Ping("tcp://x:1")) == 0


def test_a_request_that_asks_for_something_new_goes_to_nodes_that_know_it(router: RunningRouter) -> None:
    router.add("p-new", Role.PREFILL)
    router.add("d-new", Role.DECODE)
    router.wait_ready()
    for number in range(6):
        assert router.complete(prompt=f"{number} foxes", max_tokens=3, min_tokens=2).status_code == 200
    assert not router.nodes["d0"].submits
    assert not router.nodes["p0"].submits
    assert [each.sampling.min_tokens for each in router.nodes["d-new"].submits] == [2] * 6


def test_where_no_node_knows_it_the_request_is_refused_in_a_sentence(router: RunningRouter) -> None:
    answer = router.complete(max_tokens=3, min_tokens=2)
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert f"no decode node is ready that speaks version {WIRE_VERSION} of Tandem's messages" in message
    assert router.complete(max_tokens=3).status_code == 200, "one that asks for nothing new is answered"


async def test_no_link_carries_what_its_node_could_not_read() -> None:
    links = NodeLinks("127.0.0.1")
    links.listen(*[lambda *message: None] * 8)
    node = NodeInfo("d0", Role.DECODE, 7, endpoint_at(9), "", "m", 10, 4, wire_version=OLD)
    links.meet(node)
    first = links.submit(node, submit())
    with pytest.raises(Unavailable, match=f"this Submit needs version {WIRE_VERSION}"):
        links.submit(node, submit(min_tokens=1))
    links.turn_ended(node, "r", "j", None)
    assert links.submit(node, submit()).number == first.number + 1, "nothing was numbered in between"
    await links.close()
