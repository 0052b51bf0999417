"""What the router concludes from a node's acknowledgements."""

from __future__ import annotations

import asyncio
import time

import pytest

from tandem.base.errors import NodeLost
from tandem.router.links import NodeLinks
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import Cancel
from tandem.wire.tracing import ClockReading
from tests.wire.members import endpoint_at


def hear_nothing(links: NodeLinks, unsent: list[tuple[NodeInfo, str]] | None = None) -> None:
    heard = [] if unsent is None else unsent
    links.listen(*[lambda *message: None] * 7, lambda node, why: heard.append((node, why)))  # type: ignore[call-arg]


def a_node(endpoint: str) -> NodeInfo:
    return NodeInfo(
        node_id="d0",
        role=Role.DECODE,
        epoch=7,
        request_endpoint=endpoint,
        peer_endpoint="",
        model="m",
        max_model_len=10,
        block_size=4,
    )


async def test_a_node_is_deaf_by_the_pings_that_it_answered_and_not_by_how_late_the_router_reads() -> None:
    links = NodeLinks("127.0.0.1")
    hear_nothing(links)
    node = a_node(endpoint_at(9))
    links.meet(node)
    links.lines.send(node.request_endpoint, Cancel(reply_to=links.endpoint, request_ids=["r"]))
    sent = time.monotonic()
    assert links.deaf_for(node) == 0.0, "no ping was answered: nothing is known"
    links.receive(ClockReading("d0", 7, sent - 1.0, 0.0))
    assert links.deaf_for(node) == 0.0, "the answer to a ping that was sent before the message"
    links.receive(ClockReading("d0", 7, sent + 4.0, 0.0))
    assert links.deaf_for(node) == pytest.approx(4.0, abs=0.5)
    links.forget(node)
    assert links.deaf_for(node) == 0.0
    await links.close()


class CountingOutbox:
    """Refuses frames after a given number of them."""

    def __init__(self, most: int = 100) -> None:
        self.frames: list[tuple[str, bytes]] = []
        self.most = most

    def send_frame(self, endpoint: str, frame: bytes) -> None:
        if len(self.frames) >= self.most:
            raise NodeLost(f"{endpoint} is full")
        self.frames.append((endpoint, frame))

    def forget(self, endpoint: str) -> None:
        pass

    def close(self) -> None:
        pass


async def test_what_is_sent_in_one_turn_of_the_loop_leaves_after_it_in_its_order() -> None:
    outbox = CountingOutbox()
    links = NodeLinks("127.0.0.1", open_outbox=lambda: outbox)
    for endpoint in ("tcp://a", "tcp://b"):
        links.send_frame(endpoint, b"first")  # with which its connection is made
    assert len(outbox.frames) == 2
    sent = [("tcp://a", b"1"), ("tcp://b", b"2"), ("tcp://a", b"3")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.router.links.TOGETHER_S", 1000.0)
        for endpoint, frame in sent:
            links.send_frame(endpoint, frame)
        assert len(outbox.frames) == 2
        await asyncio.sleep(0)
        assert outbox.frames[2:] == sent
        patch.setattr("tandem.router.links.TOGETHER_S", -1.0)
        for endpoint, frame in sent:
            links.send_frame(endpoint, frame)
        assert outbox.frames[5:] == sent[:2], "a turn that is long keeps nothing back"
    await links.close()
    assert outbox.frames[5:] == sent


async def test_a_node_to_which_nothing_more_can_be_sent_is_told_of_once() -> None:
    outbox = CountingOutbox(most=2)
    links = NodeLinks("127.0.0.1", open_outbox=lambda: outbox)
    hear_nothing(links, unsent := [])
    node = a_node("tcp://a")
    links.meet(node)
    for frame in (b"0", b"1", b"2", b"3"):
        links.send_frame("tcp://a", frame)
    await asyncio.sleep(0)
    assert [frame for _, frame in outbox.frames] == [b"0", b"1"]
    assert unsent == [(node, "tcp://a is full")]
    with pytest.raises(NodeLost):
        links.send_frame("tcp://a", b"4")
    await links.close()


async def test_what_waits_to_leave_is_dropped_with_its_node() -> None:
    outbox = CountingOutbox()
    links = NodeLinks("127.0.0.1", open_outbox=lambda: outbox)
    node = a_node("tcp://a")
    links.meet(node)
    links.send_frame("tcp://a", b"0")
    links.send_frame("tcp://a", b"1")
    links.begin_anew(node)
    await asyncio.sleep(0)
    assert outbox.frames == [("tcp://a", b"0")]
    await links.close()
