"""What a node does for its routers and for the process that holds it, whatever its role: it hears routers and answers their pings,
reports its status, refuses new work once it drains, and fails.

`NodeService` adds an engine's requests, the encoder node's service the questions about images.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tandem.base.errors import InternalError, NodeLost, TandemError
from tandem.node.config import NodeConfig
from tandem.node.routers import Receiver, RouterLine, Routers
from tandem.wire.lines import Position
from tandem.wire.nodes import NodeState
from tandem.wire.requests import Ask, Holding, NodeStatus, Ping, ToNode
from tandem.wire.tracing import ClockReading


class NodeCondition:
    """The node's state: READY until it is drained or fails. A failed node stays FAILED. Used from any thread."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._lock = threading.Lock()  # held for every change of the state
        self._failed_as: type[TandemError] = InternalError
        self.state = NodeState.READY
        self.why: str | None = None  # why the node failed; None: it has not failed

    def drain(self) -> None:
        with self._lock:
            if self.state is NodeState.READY:
                self.state = NodeState.DRAINING

    def fail(self, error: BaseException) -> TandemError:
        """Marks the node as failed and returns the error for its live requests."""
        self.why = f"{type(error).__name__}: {error}"
        # A rank's end is never caused by a request, so each request goes on elsewhere, however often that happens.
        self._failed_as = NodeLost if isinstance(error, NodeLost) else InternalError
        with self._lock:
            self.state = NodeState.FAILED
        return self._failure()

    @property
    def failure(self) -> TandemError | None:
        """The error for a request that comes after the failure; None: the node has not failed."""
        return self._failure() if self.state is NodeState.FAILED else None

    def _failure(self) -> TandemError:
        return self._failed_as(f"node {self._node_id} has failed: {self.why}")


class NodeLifecycle:
    """Subclasses say what the node's work is: `status`, `_take`, `_list_requests` and `_come_to_rest`. Routers' messages come in the
    thread of the channel to them."""

    def __init__(
        self, config: NodeConfig, epoch: int, line: RouterLine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._line = line
        self._clock = clock
        self._receivers: list[tuple[Receiver, str]] = [(line, "its routers")]  # and who sends there
        self._condition = NodeCondition(config.node_id)
        self._routers = Routers(
            line,
            self.status,
            lost=self._on_router_lost,
            period_s=config.timeouts.status_period_s,
            silence_s=config.timeouts.router_silence_s,
            clock=clock,
        )

    # --- what a role's service says

    def status(self) -> NodeStatus:
        raise NotImplementedError

    def _take(self, message: ToNode) -> None:
        """Takes a message that says more than that its router is alive."""
        raise NotImplementedError

    def _list_requests(self, reply_to: str) -> None:
        """Tells the router which of its requests this node holds."""
        raise NotImplementedError

    def _list_cache(self, reply_to: str) -> None:
        """Tells the router what this node has cached."""

    def _come_to_rest(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` until no accepted work is left, and returns whether none is."""
        raise NotImplementedError

    def _on_router_lost(self, reply_to: str) -> None: ...

    # --- routers

    def receive(self, message: ToNode) -> None:
        is_new = self._routers.heard(message.reply_to)
        match message:
            case Ping():
                if is_new:
                    self._routers.tell_status(message.reply_to)
                if message.asked_at is not None:
                    reading = ClockReading(self._config.node_id, self._epoch, message.asked_at, self._clock())
                    self._routers.tell(message.reply_to, reading)
            case Ask():
                self._list_requests(message.reply_to)
            case _:
                self._take(message)

    def line_begun(self, reply_to: str) -> None:
        """A new line with this router has begun, so messages may be missing on either side: send it the node's full state."""
        if self._routers.heard(reply_to):
            self._routers.tell_status(reply_to)
        self._list_requests(reply_to)
        self._list_cache(reply_to)

    def router_replaced(self, reply_to: str) -> None:
        """Another incarnation of the router listens at this address: the requests of the previous one have no owner."""

    def routers_heard(self) -> list[str]:
        return self._routers.known

    def _tell_holding(self, reply_to: str, position: Position, requests: dict[str, int]) -> None:
        held = Holding(self._config.node_id, self._epoch, *position, requests=requests)
        self._routers.tell(reply_to, held)

    # --- the process that holds the node

    def start(self) -> None:
        self._routers.start()

    def report(self) -> None:
        """Sends every router this node's status; the `node-status` thread does it regularly."""
        self._routers.report()

    @property
    def failure(self) -> str | None:
        """Why this node can no longer answer; None while it can."""
        if self._condition.state is not NodeState.FAILED:
            for receiver, who in self._receivers:
                if (why := receiver.died) is not None:
                    return f"it no longer hears {who}: {why}"
        return self._condition.why

    def _reported(self, **figures: Any) -> NodeStatus:
        failure, config = self.failure, self._config
        state = self._condition.state if failure is None else NodeState.FAILED
        return NodeStatus(config.node_id, config.role, self._epoch, state, detail=failure or "", **figures)

    @property
    def malformed_frames(self) -> int:
        return sum(receiver.malformed for receiver, _ in self._receivers)

    def drain(self, timeout_s: float) -> bool:
        """Refuses new work and waits up to `timeout_s`. Returns True when everything accepted has ended and the node has not failed."""
        self._condition.drain()
        return self._come_to_rest(timeout_s) and self._condition.state is not NodeState.FAILED

    def reset_cache(self, timeout_s: float) -> bool:
        """Drops what is cached. Returns False if that takes longer than `timeout_s`; it is dropped all the same, later."""
        raise NotImplementedError

    def stop(self) -> None:
        self._routers.stop()
