"""Counters that the protocol's thread keeps and any thread may read."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, OrderedDict, deque

from tandem.kvtransfer.base import TransferStats
from tandem.kvtransfer.protocol.identity import Clock
from tandem.wire.requests import WaitHistogram
from tandem.wire.tracing import TransferRecord, TransferTrace

# The traces of this many transfers are kept until they are asked for.
REMEMBERED_TRACES = 256


class Outcome(enum.StrEnum):
    """How a transfer ended. Each is counted once on each side."""

    SENT = "sent"
    RECEIVED = "received"
    ABORTED = "aborted"  # our own request ended first
    CANCELLED = "cancelled"  # the peer gave up
    MISMATCHED = "mismatched"  # what came or was asked for is not this request's
    INCOMPATIBLE = "incompatible"  # the caches do not mean the same
    TIMED_OUT = "timed_out"
    TOO_SLOW = "too_slow"  # its link is so slow that computing the rest takes less
    LEASE_EXPIRED = "lease_expired"
    PEER_LOST = "peer_lost"  # dead, restarted, or silent beyond its lease
    MOVE_FAILED = "move_failed"  # the transport reported an error
    CORRUPTED = "corrupted"  # a checksum differs: other bytes arrived than were sent
    REFUSED = "refused"  # the producer would not take the registration
    CLOSED_BY_PEER = "closed_by_peer"
    SHUTDOWN = "shutdown"


class ReleaseReason(enum.StrEnum):
    """What made a producer's blocks free that were kept after their request had ended."""

    SENT = "sent"  # every byte arrived, and was accepted
    LEASE_ENDED = "lease_ended"
    CANCELLED = "cancelled"  # by either node
    PEER_LOST = "peer_lost"
    FAILED = "failed"  # the two nodes could not agree, or the bytes could not be moved


_FREED_BY = {
    Outcome.SENT: ReleaseReason.SENT,
    Outcome.LEASE_EXPIRED: ReleaseReason.LEASE_ENDED,
    Outcome.CANCELLED: ReleaseReason.CANCELLED,
    Outcome.ABORTED: ReleaseReason.CANCELLED,
    Outcome.SHUTDOWN: ReleaseReason.CANCELLED,
    Outcome.PEER_LOST: ReleaseReason.PEER_LOST,
}
RECENT = 32


class Recorder:
    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._left_out: dict[str, float] = {}  # peers, and until when
        self._lock = threading.Lock()
        self._stats = TransferStats()
        self._outcomes: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._wrong_kv: Counter[str] = Counter()
        self._waits: dict[str, WaitHistogram] = {}
        self._traces: OrderedDict[str, TransferTrace] = OrderedDict()  # by request
        self._freed: Counter[str] = Counter()
        self._recent: deque[TransferRecord] = deque(maxlen=RECENT)

    def began(self) -> None:
        with self._lock:
            self._stats.in_progress += 1

    def ended(self, trace: TransferTrace) -> None:
        """Called before the end is announced: a reader that knows of the end sees it counted."""
        record = trace.record
        with self._lock:
            self._stats.in_progress -= 1
            self._outcomes[record.outcome] += 1
            self._stats.leases_expired += record.outcome == Outcome.LEASE_EXPIRED
            for stage, seconds in record.waits().items():
                self._waits[stage] = self._waits.get(stage, WaitHistogram()).plus(seconds)
            self._recent.append(record)
            if record.request_id:
                self._traces[record.request_id] = trace
            if len(self._traces) > REMEMBERED_TRACES:
                self._traces.popitem(last=False)

    def quarantined(self, blocks: int) -> None:
        """Blocks that entered quarantine, or left it when negative."""
        with self._lock:
            self._stats.quarantined_blocks += blocks

    def refused(self, why: str) -> None:
        with self._lock:
            self._refused[why] += 1

    def take_trace(self, request_id: str) -> TransferTrace | None:
        with self._lock:
            return self._traces.pop(request_id, None)

    def sent(self, blocks: int, num_bytes: int, *, descriptors: int = 0, overlapped: int = 0) -> None:
        with self._lock:
            self._stats.descriptors_sent += descriptors
            self._stats.blocks_sent += blocks
            self._stats.bytes_sent += num_bytes
            self._stats.bytes_overlapped += overlapped

    def checked(self, grains: int) -> None:
        with self._lock:
            self._stats.blocks_checked += grains

    def wrong_kv(self, peer: str) -> None:
        with self._lock:
            self._wrong_kv[peer] += 1

    def left_out(self, peer: str, until: float) -> None:
        with self._lock:
            self._left_out[peer] = until

    def received(self, blocks: int, num_bytes: int) -> None:
        with self._lock:
            self._stats.blocks_received += blocks
            self._stats.bytes_received += num_bytes

    def freed(self, blocks: int, outcome: Outcome) -> None:
        with self._lock:
            self._freed[_FREED_BY.get(outcome, ReleaseReason.FAILED).value] += blocks

    def snapshot(self, malformed_frames: int) -> TransferStats:
        with self._lock:
            stats = self._stats
            return TransferStats(
                descriptors_sent=stats.descriptors_sent,
                bytes_sent=stats.bytes_sent,
                bytes_received=stats.bytes_received,
                blocks_sent=stats.blocks_sent,
                blocks_received=stats.blocks_received,
                outcomes=dict(self._outcomes),
                leases_expired=stats.leases_expired,
                malformed_frames=malformed_frames,
                in_progress=stats.in_progress,
                quarantined_blocks=stats.quarantined_blocks,
                bytes_overlapped=stats.bytes_overlapped,
                refused=dict(self._refused),
                blocks_checked=stats.blocks_checked,
                wrong_kv=dict(self._wrong_kv),
                left_out=sorted(peer for peer, until in self._left_out.items() if self._clock() < until),
                blocks_freed=dict(self._freed),
                recent=list(self._recent),
                waits=dict(self._waits),
            )
