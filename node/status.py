"""A node's state, its counters and its status reports; and the routers that get the reports, with the rule when a router counts as lost."""

from __future__ import annotations

import logging
import operator
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tandem.engine.scheduling.state import SchedulerStats, Totals
from tandem.kvtransfer.base import TransferStats
from tandem.wire.errors import InternalError, NodeLost, TandemError
from tandem.wire.lines import Position
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import EMPTY_TABLE, NodeCounters, NodeStatus, TierStatus

_COUNTED = [
    name for name in NodeCounters.__struct_fields__ if name in Totals.__struct_fields__ and name != "steps"
]
_counted = operator.attrgetter(*_COUNTED)


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


def node_status(
    node_id: str,
    role: Role,
    epoch: int,
    state: NodeState,
    scheduler: SchedulerStats,
    *,
    transfers: int,
    now: float,
    step_age_s: float,
    counters: NodeCounters,
    detail: str,
    tiers: Sequence[TierStatus],
    left_out: Sequence[str] = (),
    adapters: Mapping[str, str] | None = None,
    age_s: float = 0.0,
) -> NodeStatus:
    oldest = scheduler.oldest_arrival
    return NodeStatus(
        node_id=node_id,
        role=role,
        epoch=epoch,
        state=state,
        free_blocks=scheduler.free_blocks,
        total_blocks=scheduler.total_blocks,
        running=scheduler.running,
        waiting=scheduler.waiting,
        waiting_tokens=scheduler.waiting_tokens,
        transfers=transfers,
        held_blocks=scheduler.held_blocks,
        step_age_s=step_age_s,
        counters=counters,
        detail=detail,
        loading=scheduler.blocked,
        cached_blocks=scheduler.cached_blocks,
        held_requests=scheduler.held_requests,
        wanted_blocks=scheduler.wanted_blocks,
        oldest_wait_s=max(0.0, now - oldest) if oldest is not None else 0.0,
        quarantined_blocks=scheduler.quarantined_blocks,
        pinned_requests=scheduler.pinned_requests,
        pinned_blocks=scheduler.pinned_blocks,
        tiers=tuple(tiers),
        left_out=tuple(left_out),
        adapters=adapters or EMPTY_TABLE,
        age_s=age_s,
    )


def node_counters(
    scheduler: SchedulerStats,
    transfer: TransferStats | None,
    *,
    steps: int,
    step_seconds: float,
    malformed_frames: int,
    line_gaps: int,
    kv_checks: int,
    wrong_kv: Mapping[str, int],
    encoder_fallbacks: Mapping[str, int] | None = None,
) -> NodeCounters:
    """`transfer`: None for a node that neither sends nor receives KV. The scheduler's counters are copied by name."""
    moved = transfer if transfer is not None else TransferStats()
    return NodeCounters(
        **dict(zip(_COUNTED, _counted(scheduler), strict=True)),
        steps=steps,  # only steps that made progress
        step_seconds=step_seconds,
        malformed_frames=malformed_frames + moved.malformed_frames,
        line_gaps=line_gaps,
        transfer_bytes_sent=moved.bytes_sent,
        transfer_bytes_received=moved.bytes_received,
        transfer_blocks_sent=moved.blocks_sent,
        transfer_blocks_received=moved.blocks_received,
        transfers_finished=_copied(moved.outcomes),
        leases_expired=moved.leases_expired,
        transfer_descriptors_sent=moved.descriptors_sent,
        transfer_bytes_overlapped=moved.bytes_overlapped,
        transfer_refusals=_copied(moved.refused),
        transfer_blocks_freed=_copied(moved.blocks_freed),
        transfer_blocks_checked=moved.blocks_checked,
        wrong_kv=dict(Counter(moved.wrong_kv) + Counter(wrong_kv))
        if moved.wrong_kv or wrong_kv
        else EMPTY_TABLE,
        transfer_wait_seconds=_copied(moved.waits),
        kv_checks=kv_checks,
        encoder_fallbacks=_copied(encoder_fallbacks or {}),
    )


def _copied(counts: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(counts) if counts else EMPTY_TABLE


logger = logging.getLogger(__name__)

COUNTERS_PERIOD_S = 1.0  # between two reports with counters


class RouterLine(Protocol):
    """The node's end of the line to its routers."""

    @property
    def malformed(self) -> int: ...
    @property
    def died(self) -> str | None:
        """Why the line receives nothing any more although it was not closed; None while it receives."""
        ...

    @property
    def gaps(self) -> int:
        """How many times messages were missing and were requested again."""
        ...

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        """Queues a message. Raises NodeLost when the router does not read. The first message opens a connection, which stays open."""
        ...

    def received(self, endpoint: str) -> Position:
        """The position of the router's last delivered message."""
        ...

    def forget(self, endpoint: str) -> None:
        """Drops the connection and the messages queued on it."""
        ...


class Routers:
    """The routers that this node has heard lately. Every method may be called from any thread.

    A router that is silent for `silence_s`, or does not read, is lost: `lost` is called once, and the router counts as new when it is
    heard again. A lost router gets no message and has no connection, because messages that it does not read would pile up."""

    def __init__(
        self,
        line: RouterLine,
        status: Callable[[], NodeStatus],
        lost: Callable[[str], None],  # called under the lock: must not wait
        *,
        period_s: float,  # between two status reports to all routers
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._line = line
        self._status = status
        self._lost = lost
        self._period_s = period_s
        self._counted_every = max(1, round(COUNTERS_PERIOD_S / period_s))
        self._reports = 0
        self._silence_s = silence_s
        self._clock = clock
        self._heard: dict[str, float] = {}  # router's address -> when it was last heard
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._report, name="node-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(5)

    @property
    def known(self) -> list[str]:
        """The addresses of the routers that were heard lately."""
        with self._lock:
            return list(self._heard)

    def heard(self, reply_to: str) -> bool:
        """Notes that a message of this router has come. Returns True if the router was not known before."""
        with self._lock:
            is_new = reply_to not in self._heard
            self._heard[reply_to] = self._clock()
        return is_new

    def tell(self, reply_to: str, message: msgspec.Struct) -> None:
        with self._lock:
            if reply_to not in self._heard:
                return
            try:
                self._line.send(reply_to, message)
            except NodeLost as error:
                logger.warning("router lost: %s", error)
                self._lose(reply_to)

    def tell_status(self, reply_to: str) -> None:
        self.tell(reply_to, self._status())

    def tell_all_status(self) -> None:
        for reply_to in self.known:
            self.tell_status(reply_to)

    def report(self) -> None:
        """Drops the routers that are silent, and sends the status to the others: with counters every COUNTERS_PERIOD_S, because they
        are most of a status."""
        status = self._status()
        if self._reports % self._counted_every:
            status = msgspec.structs.replace(status, counters=None)
        self._reports += 1
        for reply_to in self.known:
            self._lose_if_silent(reply_to)
            self.tell(reply_to, status)

    def _report(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                self.report()
            except Exception:
                # This thread must go on: routers give up a node that does not report, and the controller would not replace it.
                logger.exception("the status was not sent to every router")

    def _lose_if_silent(self, reply_to: str) -> None:
        with self._lock:
            silent_s = self._clock() - self._heard.get(reply_to, self._clock())
            if silent_s > self._silence_s:
                logger.warning(
                    "router %s has been silent for %.0f s: aborting its requests", reply_to, silent_s
                )
                self._lose(reply_to)

    def _lose(self, reply_to: str) -> None:
        """Called under the lock, so that `lost` is called before the router can be heard again."""
        del self._heard[reply_to]
        self._line.forget(reply_to)
        self._lost(reply_to)
