"""The router's sockets, on the event loop: one inbox that every node sends to, and one outbox to all of them.

Both directions are numbered lines (`wire.lines`): the receiver notices a lost message and asks for it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from tandem.base.errors import NodeLost, Unavailable, WireError
from tandem.wire.lines import LetterToRouter, Lines, Position
from tandem.wire.nodes import NodeInfo, new_epoch
from tandem.wire.requests import (
    Ask,
    CacheNews,
    Cancel,
    EndAnswer,
    Follow,
    Holding,
    ListCache,
    NodeStatus,
    Ping,
    Recall,
    Recalled,
    Submit,
    TokenBatch,
    ToRouter,
    TurnEnded,
)
from tandem.wire.sockets import LoopInbox, Outbox
from tandem.wire.tracing import ClockReading, NodeTrace
from tandem.wire.versions import WIRE_VERSION, needed_version

logger = logging.getLogger(__name__)

# Each send wakes ZMQ's thread. So all frames of one turn of the event loop are sent together, no later than
# this.
TOGETHER_S = 0.001


class Links(Protocol):
    """What dispatch needs of the connection to the nodes. `NodeLinks` documents each method."""

    @property
    def endpoint(self) -> str: ...
    def meet(self, node: NodeInfo) -> None: ...
    def submit(self, node: NodeInfo, submit: Submit) -> Position: ...
    def has_heard(self, node: NodeInfo, message: Position) -> bool: ...
    def deaf_for(self, node: NodeInfo) -> float: ...
    def cancel(self, node: NodeInfo, request_id: str) -> None: ...
    def ping(self, node: NodeInfo) -> None: ...
    def ask(self, node: NodeInfo) -> None: ...
    def list_cache(self, node: NodeInfo) -> None: ...
    def recall(self, node: NodeInfo, answer_id: str) -> None: ...
    def follow(self, node: NodeInfo, request_id: str, answer_id: str, after: int) -> None: ...
    def end_answer(self, node: NodeInfo, answer_id: str, error: WireError, *, forget: bool) -> None: ...
    def turn_ended(self, node: NodeInfo, request_id: str, job_id: str, called: list[str] | None) -> None: ...
    def begin_anew(self, node: NodeInfo) -> None: ...
    def forget(self, node: NodeInfo) -> None: ...


class RouterInbox(Protocol):
    """What NodeLinks needs of a LoopInbox."""

    endpoint: str
    malformed: int
    handler_errors: int

    def listen(self) -> None: ...
    def close(self) -> None: ...


class RouterOutbox(Protocol):
    """What NodeLinks needs of an Outbox."""

    def send_frame(self, endpoint: str, frame: bytes) -> None: ...
    def forget(self, endpoint: str) -> None: ...
    def close(self) -> None: ...


class NodeLinks:
    """Numbered lines to all nodes. It can send at once, and receives from `listen` on."""

    def __init__(
        self,
        host: str,
        *,
        open_inbox: Callable[..., RouterInbox] = LoopInbox,
        open_outbox: Callable[[], RouterOutbox] = Outbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._cancels: dict[NodeInfo, list[str]] = {}
        self._outbox = open_outbox()
        self._leaving: list[tuple[str, bytes]] = []  # frames to send, with their endpoints
        self._leave_by = 0.0
        self._members: dict[str, NodeInfo] = {}  # by endpoint
        self._reached: set[str] = set()  # endpoints with a connection
        # by node and epoch: when the last ping that it answered was sent
        self._answered: dict[tuple[str, int], float] = {}
        self.lines: Lines[ToRouter] = Lines(
            new_epoch(), self.send_frame, self.receive, meets_strangers=False, clock=clock
        )
        self._inbox = open_inbox(host, LetterToRouter, self.lines.receive, name="router-inbox")
        self.lines.endpoint = self._inbox.endpoint

    def listen(
        self,
        on_tokens: Callable[[TokenBatch], None],
        on_status: Callable[[NodeStatus], None],
        on_trace: Callable[[NodeTrace], None],
        on_clock: Callable[[ClockReading], None],
        on_holding: Callable[[Holding], None],
        on_recalled: Callable[[Recalled], None],
        on_cache_news: Callable[[CacheNews], None],
        on_unsent: Callable[[NodeInfo, str], None],
    ) -> None:
        """Begins to receive, and calls one handler for each kind of message. `on_unsent(node, why)`: a queued
        frame could not be sent to the node."""
        self._on_tokens = on_tokens
        self._on_status = on_status
        self._on_trace = on_trace
        self._on_clock = on_clock
        self._on_holding = on_holding
        self._on_recalled = on_recalled
        self._on_cache_news = on_cache_news
        self._on_unsent = on_unsent
        self._inbox.listen()

    def send_frame(self, endpoint: str, frame: bytes) -> None:
        """Queues a frame, or, as the first to an endpoint, sends it at once. Raises NodeLost when that send
        fails."""
        if endpoint not in self._reached:
            self._send_together()
            self._outbox.send_frame(endpoint, frame)
            self._reached.add(endpoint)
            return
        if not self._leaving:
            self._leave_by = self._clock() + TOGETHER_S
            self._loop.call_soon(self._send_together)
        self._leaving.append((endpoint, frame))
        if len(self._leaving) > 1 and self._clock() > self._leave_by:
            self._send_together()

    def _send_together(self) -> None:
        leaving, self._leaving = self._leaving, []
        for endpoint, frame in leaving:
            if endpoint not in self._reached:  # an earlier frame to this endpoint could not be sent
                continue
            try:
                self._outbox.send_frame(endpoint, frame)
            except NodeLost as error:
                self._reached.discard(endpoint)
                if (node := self._members.get(endpoint)) is not None:
                    self._on_unsent(node, str(error))

    def _drop_leaving(self, endpoint: str) -> None:
        self._leaving = [(to, frame) for to, frame in self._leaving if to != endpoint]
        self._reached.discard(endpoint)

    def receive(self, message: ToRouter) -> None:
        if isinstance(message, TokenBatch):
            self._on_tokens(message)
        elif isinstance(message, NodeStatus):
            self._on_status(message)
        elif isinstance(message, NodeTrace):
            self._on_trace(message)
        elif isinstance(message, Holding):
            self._on_holding(message)
        elif isinstance(message, Recalled):
            self._on_recalled(message)
        elif isinstance(message, CacheNews):
            self._on_cache_news(message)
        else:
            self._answered[message.node_id, message.epoch] = message.asked_at
            self._on_clock(message)

    @property
    def endpoint(self) -> str:
        return self.lines.endpoint

    @property
    def malformed(self) -> int:
        return self._inbox.malformed

    @property
    def foreign(self) -> int:
        """How many letters came from nodes or incarnations that are not members."""
        return self.lines.foreign

    @property
    def handler_errors(self) -> int:
        return self._inbox.handler_errors

    def meet(self, node: NodeInfo) -> None:
        """Makes the node a member: its messages are taken from now on."""
        self._members[node.request_endpoint] = node
        self.lines.meet(node.request_endpoint, node.epoch)

    def submit(self, node: NodeInfo, submit: Submit) -> Position:
        """Sends a request, and returns its position on the line to the node. Raises NodeLost when the node
        has not been reading for long, and Unavailable when the node's version could not read the message,
        which would block its line."""
        if (why := _unreadable(node, submit)) is not None:
            raise Unavailable(why)
        return self.lines.send(node.request_endpoint, submit)

    def has_heard(self, node: NodeInfo, message: Position) -> bool:
        """Whether the node has acknowledged the message. A message on a line that was replaced is never
        acknowledged."""
        acknowledged = self.lines.acknowledged(node.request_endpoint)
        return acknowledged.line == message.line and acknowledged.number >= message.number

    def deaf_for(self, node: NodeInfo) -> float:
        """For how long the node has answered pings without acknowledging a message that was sent before them;
        0 when it acknowledges. Pings count by when they were sent, so a router that is slow to read finds no
        node deaf."""
        since = self.lines.unheard_since(node.request_endpoint)
        answered = self._answered.get((node.node_id, node.epoch))
        return max(answered - since, 0.0) if since is not None and answered is not None else 0.0

    def cancel(self, node: NodeInfo, request_id: str) -> None:
        """Cancels a request. All cancels of one turn of the event loop are sent after it, in one message per
        node."""
        if not self._cancels:
            self._loop.call_soon(self._send_cancels)
        self._cancels.setdefault(node, []).append(request_id)

    def _send_cancels(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for node, request_ids in cancels.items():
            self._try(node, Cancel(self.endpoint, request_ids))

    def ping(self, node: NodeInfo) -> None:
        self._try(node, Ping(self.endpoint, asked_at=self._clock()))

    def ask(self, node: NodeInfo) -> None:
        """Asks the node which requests it holds. It answers with Holding."""
        self._try(node, Ask(self.endpoint))

    def list_cache(self, node: NodeInfo) -> None:
        """Asks the node to list its whole cache. It answers with CacheNews from number 0."""
        self._try(node, ListCache(self.endpoint))

    def recall(self, node: NodeInfo, answer_id: str) -> None:
        """Asks the node whether it keeps this answer. It replies with Recalled."""
        self._try(node, Recall(self.endpoint, answer_id))

    def follow(self, node: NodeInfo, request_id: str, answer_id: str, after: int) -> None:
        """Asks for a kept answer's tokens from index `after` on. The node sends them at once and as they
        come."""
        self._try(node, Follow(self.endpoint, request_id, answer_id, after))

    def end_answer(self, node: NodeInfo, answer_id: str, error: WireError, *, forget: bool) -> None:
        self._try(node, EndAnswer(self.endpoint, answer_id, forget, error))

    def turn_ended(self, node: NodeInfo, request_id: str, job_id: str, called: list[str] | None) -> None:
        """`called`: the tools that the answer calls; None when it was not parsed for calls."""
        self._try(node, TurnEnded(self.endpoint, request_id, job_id, called))

    def _try(
        self, node: NodeInfo, message: Cancel | Ping | Ask | ListCache | Recall | Follow | EndAnswer | TurnEnded
    ) -> None:
        """Sends a message, and only logs a failure: a node that reads nothing soon falls silent, and is
        lost."""
        if (why := _unreadable(node, message)) is not None:
            logger.debug("%s", why)
            return
        try:
            self.lines.send(node.request_endpoint, message)
        except NodeLost as error:
            logger.warning("%s to node %s not sent: %s", type(message).__name__, node.node_id, error)

    def begin_anew(self, node: NodeInfo) -> None:
        """Drops what was sent to the node and has not arrived. The node's messages are still taken."""
        self._drop_leaving(node.request_endpoint)
        self._outbox.forget(node.request_endpoint)
        self.lines.begin_anew(node.request_endpoint)

    def forget(self, node: NodeInfo) -> None:
        """Drops all that concerns a node that is no longer a member."""
        self._answered.pop((node.node_id, node.epoch), None)
        self._drop_leaving(node.request_endpoint)
        if self._members.get(node.request_endpoint) == node:
            del self._members[node.request_endpoint]
        self._outbox.forget(node.request_endpoint)
        self.lines.forget(node.request_endpoint)

    async def close(self) -> None:
        """Sends what is queued, to nodes that read it, and closes both sockets. Idempotent."""
        self._send_cancels()
        self._send_together()
        self._inbox.close()
        await asyncio.to_thread(self._outbox.close)


def _unreadable(node: NodeInfo, message: msgspec.Struct) -> str | None:
    """Returns why a node of an older version could not read the message, or None."""
    if node.wire_version >= WIRE_VERSION or node.wire_version >= (needed := needed_version(message)):
        return None
    return (
        f"node {node.node_id} speaks version {node.wire_version} of Tandem's messages, and this "
        f"{type(message).__name__} needs version {needed}"
    )
