"""What producer and consumer of one node share: its identity to peers, its transport and channel, its answers to messages
that it cannot act on, a bounded memory of what is over, and what it measures: rates of links and of computing, whether
a transfer is still worth its wait, how each ended.

The producer of a push measures its link, and tells the consumer if it is slow (`TransferPace`). The consumer of a pull
measures its own reads. The consumer decides, because only it knows how long it would take to compute the rest itself.
The protocol's thread counts, and any thread may read the counters.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tandem.kvtransfer.base import TransferStats
from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.protocol.cache_map import PoolGeometry
from tandem.kvtransfer.protocol.checksums import Checksums
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.transport import Direction, Transport
from tandem.kvtransfer.sources import NodeSources
from tandem.wire.handoff import Envelope, ProcessIdentity, Refusal, RefusalCode, TransferClosed
from tandem.wire.requests import WaitHistogram
from tandem.wire.tracing import TransferRecord, TransferTrace

Value = TypeVar("Value")
Clock = Callable[[], float]


class PeerKey(NamedTuple):
    """One incarnation of one node."""

    node_id: str
    epoch: int


def key_of(envelope: Envelope) -> PeerKey:
    return PeerKey(envelope.sender_id, envelope.sender_epoch)


@dataclasses.dataclass(slots=True)
class Identity:
    node_id: str
    epoch: int
    endpoint: str
    generation: int = 0  # of this node's cache

    def envelope(self, receiver_epoch: int) -> Envelope:
        return Envelope(
            sender_id=self.node_id,
            sender_epoch=self.epoch,
            receiver_epoch=receiver_epoch,
            reply_to=self.endpoint,
            generation=self.generation,
        )


# So many transfers' traces are kept until they are asked for.
REMEMBERED_TRACES = 256


class Outcome(enum.StrEnum):
    """How a transfer ended. Each side counts each transfer once."""

    SENT = "sent"
    RECEIVED = "received"
    ABORTED = "aborted"  # our own request ended first
    CANCELLED = "cancelled"  # the peer gave the transfer up
    MISMATCHED = "mismatched"  # the notice or the registration is not for this request
    INCOMPATIBLE = "incompatible"  # the caches differ in a way that no mapping bridges
    TIMED_OUT = "timed_out"
    TOO_SLOW = "too_slow"  # the link is so slow that computing the rest takes less time
    LEASE_EXPIRED = "lease_expired"
    PEER_LOST = "peer_lost"  # dead, restarted, or silent until its lease ended
    MOVE_FAILED = "move_failed"  # the transport reported an error
    CORRUPTED = "corrupted"  # a checksum differs: other bytes arrived than were sent
    REFUSED = "refused"  # the producer refused the registration
    CLOSED_BY_PEER = "closed_by_peer"
    SHUTDOWN = "shutdown"


class ReleaseReason(enum.StrEnum):
    """Why a producer's blocks became free that were kept after their request's end."""

    SENT = "sent"  # every byte arrived, and the consumer accepted the handoff
    LEASE_ENDED = "lease_ended"
    CANCELLED = "cancelled"  # by either node
    PEER_LOST = "peer_lost"
    FAILED = "failed"  # the two nodes did not agree, or the bytes could not be moved


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
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_out: dict[str, float] = {}  # until when each peer is left out
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
        """Called before the end is announced, so that a reader who knows of the end sees it counted."""
        record = trace.record
        with self._lock:
            self._stats.in_progress -= 1
            self._outcomes[record.outcome] += 1
            self._stats.leases_expired += record.outcome == Outcome.LEASE_EXPIRED
            for stage, seconds in record.waits.items():
                self._waits[stage] = self._waits.get(stage, WaitHistogram()).plus(seconds)
            self._recent.append(record)
            if record.request_id:
                self._traces[record.request_id] = trace
            if len(self._traces) > REMEMBERED_TRACES:
                self._traces.popitem(last=False)

    def quarantined(self, blocks: int) -> None:
        """`blocks` entered quarantine; a negative number left it."""
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
            return msgspec.structs.replace(
                self._stats,
                outcomes=dict(self._outcomes),
                malformed_frames=malformed_frames,
                refused=dict(self._refused),
                wrong_kv=dict(self._wrong_kv),
                left_out=sorted(peer for peer, until in self._left_out.items() if self._clock() < until),
                blocks_freed=dict(self._freed),
                recent=list(self._recent),
                waits=dict(self._waits),
            )


_PAUSE_S = 0.005  # a shorter pause between two moves is this node's doing, not the link's
_KEPT_OF_STEPS = 0.9  # each later step lowers an earlier step's weight by this factor


class LinkMeter:
    """The recent rate of one link.

    Only a move's end can be seen, so bytes are counted from one end to a later one, at least `over_s` apart. The
    rate is unknown while nothing is in flight, because the link may have changed since.
    """

    def __init__(self, over_s: float) -> None:
        self.in_flight = 0
        self.last_measured: float | None = None  # kept while nothing is in flight
        self._over_s = over_s
        self._since = self._last_end = -math.inf  # the interval over which bytes are counted
        self._moved: deque[tuple[float, int]] = deque()  # (when, how many bytes)

    def posted(self, num_bytes: int, now: float) -> None:
        if not self.in_flight and now > self._last_end + _PAUSE_S:
            self._since = self._last_end = now
            self._moved.clear()
        self.in_flight += num_bytes

    def withdrawn(self, num_bytes: int) -> None:
        """These bytes will not arrive."""
        self.in_flight -= num_bytes

    def moved(self, num_bytes: int, now: float) -> None:
        self.in_flight -= num_bytes
        self._last_end = now
        self._moved.append((now, num_bytes))
        self._forget_before(now - self._over_s)
        if self.last_measured is not None and not self.in_flight and now > self._since:
            # Too short a time for a measurement, but a lower bound: a link that was slow once can count as fast again.
            self.last_measured = max(self.last_measured, self._bytes_moved / (now - self._since))

    @property
    def _bytes_moved(self) -> int:
        return sum(num_bytes for _, num_bytes in self._moved)

    def bytes_per_s(self, now: float) -> float | None:
        """Returns the link's rate; None while it is unknown. If no move has ended for a while, all bytes in flight
        may be about to arrive, so the rate is at most that: a link that stands still seems slower with each call."""
        self._forget_before(now - self._over_s)
        if not self.in_flight or now - self._since < self._over_s:
            return None
        moved = self._bytes_moved
        self.last_measured = (moved + self.in_flight) / (now - self._since)
        if self._last_end > self._since:
            self.last_measured = min(self.last_measured, moved / (self._last_end - self._since))
        return self.last_measured

    def grains_of_a_post(self, settings: ProtocolSettings, grain_bytes: int, runs: int) -> int:
        """Returns how many grains one post has, each of `runs` runs of bytes."""
        most = settings.max_post_bytes
        if self.last_measured is not None:
            most = min(most, max(settings.min_post_bytes, int(self.last_measured * settings.post_s)))
        return max(1, min(most // grain_bytes, settings.max_post_runs // runs))

    def has_room(self, settings: ProtocolSettings, post_bytes: int, now: float) -> bool:
        """Whether one more post fits into what may be in flight."""
        self.bytes_per_s(now)
        most = settings.max_link_bytes
        if self.last_measured is not None:
            most = min(most, max(2 * post_bytes, int(self.last_measured * settings.link_s)))
        return not self.in_flight or self.in_flight + post_bytes <= most

    def _forget_before(self, when: float) -> None:
        while self._moved and self._moved[0][0] <= when:
            self._since, _ = self._moved.popleft()


@dataclasses.dataclass(slots=True)
class LinkPace:
    """A slow link `at` some moment: its rate, and the bytes that it has to move."""

    bytes_per_s: float
    in_flight: int  # these bytes go first and cannot be taken back
    waiting: dict[str, int]  # the rest of each transfer; the link serves them in turn
    at: float

    def leave(self, now: float, is_over: Callable[[str, float], bool]) -> list[str]:
        """Returns the transfers that leave the link to the others, the largest first. Calls `is_over` with each, and
        the seconds until its last byte arrives. Before that byte, all bytes of every smaller transfer go through the
        link, and as many of every larger one that stays."""
        rest, larger, left = sum(self.waiting.values()), 0, []
        for transfer_id, mine in sorted(self.waiting.items(), key=lambda item: item[1], reverse=True):
            ahead = self.in_flight + rest + larger * mine
            rest -= mine
            if is_over(transfer_id, ahead / self.bytes_per_s - (now - self.at)):
                del self.waiting[transfer_id]
                left.append(transfer_id)
            else:
                larger += 1
        return left

    @property
    def longest_s(self) -> float:
        return (self.in_flight + sum(self.waiting.values())) / self.bytes_per_s if self.waiting else 0.0


class ComputeRate:
    """The engine's rate for prompt tokens. Longer steps weigh more, because a short step's time is mostly fixed
    cost."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def took(self, num_tokens: int, seconds: float) -> None:
        self._tokens = _KEPT_OF_STEPS * self._tokens + num_tokens
        self._seconds = _KEPT_OF_STEPS * self._seconds + seconds

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None


class Patience:
    """Gives a transfer up if waiting for it takes `patience_s` longer than computing the missing tokens here would.
    This counts that the engine first computes what was given up before, so that of many transfers over one slow link
    some stay on it."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._computing_until = 0.0  # when everything that was given up so far is computed

    def is_over(self, expected_s: float, num_tokens: int, tokens_per_s: float | None) -> bool:
        """`expected_s`: the seconds until everything has arrived; `num_tokens` are missing. True counts them as given
        up."""
        if tokens_per_s is None or not tokens_per_s > 0:
            return False
        now = self._clock()
        computed_at = max(now, self._computing_until) + num_tokens / tokens_per_s
        if now + expected_s <= computed_at + self._patience_s:
            return False
        self._computing_until = computed_at
        return True


Send = Callable[[str, msgspec.Struct], None]
"""Sends a message to an endpoint. Never blocks."""

Forget = Callable[[str], None]
"""Drops what is kept for an endpoint: no process is there any more, or none that we still talk to."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSide:
    me: Identity
    geometry: PoolGeometry
    direction: Direction
    transport: Transport
    settings: ProtocolSettings
    send: Send
    forget: Forget
    clock: Clock
    recorder: Recorder
    process: ProcessIdentity
    checksums: Checksums
    checksum_policy: ChecksumPolicy
    sources: NodeSources = dataclasses.field(default_factory=NodeSources)


class BoundedMemory(Generic[Value]):
    """Remembers entries for a while, at most `limit` of them: a late message about a closed transfer is then known
    to be late. Drops the oldest first."""

    def __init__(self, limit: int, seconds: float, clock: Clock) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._entries: OrderedDict[Hashable, tuple[float, Value]] = OrderedDict()

    def add(self, key: Hashable, value: Value) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._seconds, value)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: Hashable) -> Value | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        expires, value = entry
        if expires <= self._clock():
            del self._entries[key]
            return None
        return value


class TransferEnd(msgspec.Struct, frozen=True):
    """How a transfer ended, for a peer that asks late."""

    reason: str
    handed_over: bool = False
    is_void: bool = False


class Answers:
    def __init__(self, me: Identity, send: Callable[[str, msgspec.Struct], None], recorder: Recorder) -> None:
        self._me = me
        self._send = send
        self._recorder = recorder

    def say(self, question: Envelope, answer: msgspec.Struct) -> None:
        self._send(question.reply_to, answer)

    def back_to(self, question: Envelope) -> Envelope:
        return self._me.envelope(question.sender_epoch)

    def closed(self, question: Envelope, transfer_id: str, ending: TransferEnd) -> None:
        self.say(
            question,
            TransferClosed(
                self.back_to(question),
                transfer_id,
                ending.reason,
                handed_over=ending.handed_over,
                is_void=ending.is_void,
            ),
        )

    def refuse_epoch(self, question: Envelope) -> None:
        """The sender addressed another incarnation. The answer does not tell our own epoch: it is a secret, and the
        sender has not shown that it knows it."""
        self._recorder.refused(RefusalCode.WRONG_EPOCH.value)
        envelope = msgspec.structs.replace(self.back_to(question), sender_epoch=0)
        reason = "another incarnation of this node was addressed"
        self.say(
            question, Refusal(envelope, "", RefusalCode.WRONG_EPOCH, reason, addressed_epoch=question.receiver_epoch)
        )

    def refuse(self, question: Envelope, transfer_id: str, code: RefusalCode, reason: str) -> None:
        self._recorder.refused(code.value)
        self.say(
            question,
            Refusal(self.back_to(question), transfer_id, code, reason, addressed_epoch=question.receiver_epoch),
        )
