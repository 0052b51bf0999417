"""What the router concludes from what a node has acknowledged."""

from __future__ import annotations

import asyncio
import time

import pytest

from tandem.router.links import NodeLinks
from tandem.wire.nodes import NodeInfo, Role
from tandem.wire.requests import Cancel
from tandem.wire.tracing import ClockReading
from tests.wire.members import endpoint_at


def test_a_node_is_deaf_by_the_pings_that_it_answered_and_not_by_how_late_the_router_reads() -> None:
    async def work() -> None:
        links = NodeLinks("127.0.0.1")
        links.listen(*[lambda message: None] * 7)
        node = NodeInfo(
            node_id="d0",
            role=Role.DECODE,
            epoch=7,
            request_endpoint=endpoint_at(9),
            peer_endpoint="",
            model="m",
            max_model_len=10,
            block_size=4,
        )
        links.meet(node)
        links.lines.send(node.request_endpoint, Cancel(reply_to=links.endpoint, request_ids=["r"]))
        sent = time.monotonic()
        assert links.deaf_for(node) == 0.0, "no ping was answered: nothing is known"
        links._receive(ClockReading("d0", 7, sent - 1.0, 0.0))
        assert links.deaf_for(node) == 0.0, "the answer to a ping that was sent before the message"
        links._receive(ClockReading("d0", 7, sent + 4.0, 0.0))
        assert links.deaf_for(node) == pytest.approx(4.0, abs=0.5)
        links.forget(node)
        assert links.deaf_for(node) == 0.0
        await links.close()

    asyncio.run(work())
