"""The router's sockets: one Inbox that every node answers to, one Outbox to them all, bridged into asyncio.

The Inbox's thread decodes messages and leaves them in a queue; the event loop is woken once for everything that
is there by then, so a burst of nodes' batches costs one wake-up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from wire.errors import NodeLost
from wire.nodes import NodeInfo
from wire.requests import Cancel, NodeStatus, Ping, Submit, TokenBatch, ToRouter
from wire.sockets import Inbox, Outbox

logger = logging.getLogger(__name__)


class NodeLinks:
    """Everything but the Inbox's thread runs on the event loop."""

    def __init__(
        self,
        host: str,
        on_tokens: Callable[[TokenBatch], None],
        on_status: Callable[[NodeStatus], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_tokens = on_tokens
        self._on_status = on_status
        self._arrived: deque[TokenBatch | NodeStatus] = deque()
        self._cancels: dict[NodeInfo, list[str]] = {}
        self._closed = False
        self.handler_errors = 0
        self._outbox = Outbox()
        self._inbox: Inbox[TokenBatch | NodeStatus] = Inbox(
            host, ToRouter, self._receive, name="router-inbox"
        )

    @property
    def endpoint(self) -> str:
        return self._inbox.endpoint

    @property
    def malformed(self) -> int:
        return self._inbox.malformed

    @property
    def died(self) -> str | None:
        """Why no node is heard any more."""
        return self._inbox.died

    def _receive(self, message: TokenBatch | NodeStatus) -> None:
        """In the Inbox's thread. Only the message that finds the queue empty wakes the loop."""
        self._arrived.append(message)
        if len(self._arrived) == 1:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop has closed under a message that came late
                self._arrived.clear()

    def _deliver(self) -> None:
        arrived = self._arrived
        while arrived:
            # Peek, handle, then remove: while one is left here, `_receive` knows that this loop will see more.
            message = arrived[0]
            if not self._closed:
                try:
                    if isinstance(message, TokenBatch):
                        self._on_tokens(message)
                    else:
                        self._on_status(message)
                except Exception:
                    self.handler_errors += 1
                    logger.exception("handling a %s failed", type(message).__name__)
            arrived.popleft()

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
        self._try(node, Ping(self.endpoint))

    def _try(self, node: NodeInfo, message: Cancel | Ping) -> None:
        """For messages whose loss is told by other means: a node that reads neither is soon silent, and lost."""
        try:
            self._outbox.send(node.request_endpoint, message)
        except NodeLost as error:
            logger.warning("%s to node %s not sent: %s", type(message).__name__, node.node_id, error)

    def forget(self, node: NodeInfo) -> None:
        self._outbox.forget(node.request_endpoint)

    def close(self) -> None:
        """Idempotent, from any thread once the loop no longer uses it. What was sent just before still leaves, if
        somebody reads it."""
        self._closed = True
        self._send_cancels()
        self._inbox.close()
        self._outbox.close()
