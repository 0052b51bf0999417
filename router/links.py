"""The router's sockets: one inbox that every node answers to, one outbox to them all, on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tandem.wire.errors import NodeLost
from tandem.wire.loop_inbox import LoopInbox
from tandem.wire.loop_outbox import LoopOutbox
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import Cancel, NodeStatus, Ping, Submit, TokenBatch, ToRouter
from tandem.wire.tracing import ClockReading, NodeTrace

logger = logging.getLogger(__name__)


class NodeLinks:
    """It can send at once, and hears what is sent to it from `listen` on."""

    def __init__(self, host: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancels: dict[NodeInfo, list[str]] = {}
        self._outbox = LoopOutbox()
        self._inbox: LoopInbox[ToRouter] = LoopInbox(host, ToRouter, self._receive, name="router-inbox")

    async def listen(
        self,
        on_tokens: Callable[[TokenBatch], None],
        on_status: Callable[[NodeStatus], None],
        on_trace: Callable[[NodeTrace], None],
        on_clock: Callable[[ClockReading], None],
    ) -> None:
        self._on_tokens = on_tokens
        self._on_status = on_status
        self._on_trace = on_trace
        self._on_clock = on_clock
        await self._inbox.listen()

    def _receive(self, message: ToRouter) -> None:
        if isinstance(message, TokenBatch):
            self._on_tokens(message)
        elif isinstance(message, NodeStatus):
            self._on_status(message)
        elif isinstance(message, NodeTrace):
            self._on_trace(message)
        else:
            self._on_clock(message)

    @property
    def endpoint(self) -> str:
        return self._inbox.endpoint

    @property
    def malformed(self) -> int:
        return self._inbox.malformed

    @property
    def handler_errors(self) -> int:
        return self._inbox.handler_errors

    def submit(self, node: NodeInfo, submit: Submit) -> None:
        """Raises NodeLost when the node has not been reading for long."""
        self._outbox.send(node.request_endpoint, submit)

    def cancel(self, node: NodeInfo, request_id: str) -> None:
        """All that is cancelled in one turn of the loop leaves in one message per node, after it."""
        if not self._cancels:
            self._loop.call_soon(self._send_cancels)
        self._cancels.setdefault(node, []).append(request_id)

    def _send_cancels(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for node, request_ids in cancels.items():
            self._try(node, Cancel(self.endpoint, request_ids))

    def ping(self, node: NodeInfo) -> None:
        self._try(node, Ping(self.endpoint, asked_at=time.monotonic()))

    def _try(self, node: NodeInfo, message: Cancel | Ping) -> None:
        """For messages whose loss is told by other means: a node that reads neither is soon silent, and lost."""
        try:
            self._outbox.send(node.request_endpoint, message)
        except NodeLost as error:
            logger.warning("%s to node %s not sent: %s", type(message).__name__, node.node_id, error)

    def forget(self, node: NodeInfo) -> None:
        self._outbox.forget(node.request_endpoint)

    async def close(self) -> None:
        """Idempotent. What was sent just before still leaves, if somebody reads it."""
        self._send_cancels()
        self._inbox.close()
        await self._outbox.close()
