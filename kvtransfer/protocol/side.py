"""What both sides of one node have in common: who the node is to its peers, durations and limits, what moves its bytes, what its messages
leave by, what it says to a message that it cannot act on, or has acted on already, and how it remembers what is over."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tandem.kvtransfer.config import MAX_LEASE_S, ChecksumPolicy, LoadFailurePolicy, TransferConfig
from tandem.kvtransfer.protocol.cache_map import PoolGeometry
from tandem.kvtransfer.protocol.checksums import Checksums
from tandem.kvtransfer.protocol.statistics import Recorder
from tandem.kvtransfer.protocol.transport import Direction, Transport
from tandem.wire.errors import ConfigurationError
from tandem.wire.handoff import Envelope, ProcessIdentity, Refusal, RefusalCode, TransferClosed

Clock = Callable[[], float]


class PeerKey(NamedTuple):
    """One incarnation of one node."""

    node_id: str
    epoch: int


def key_of(envelope: Envelope) -> PeerKey:
    return PeerKey(envelope.sender_id, envelope.sender_epoch)


class Identity(NamedTuple):
    node_id: str
    epoch: int
    endpoint: str

    def envelope(self, receiver_epoch: int) -> Envelope:
        return Envelope(
            sender_id=self.node_id,
            sender_epoch=self.epoch,
            receiver_epoch=receiver_epoch,
            reply_to=self.endpoint,
        )


class ProtocolSettings(msgspec.Struct, frozen=True):
    lease_s: float = 10.0
    timeout_s: float = 60.0
    handshake_timeout_s: float = 5.0
    retry_s: float = 0.25  # an unanswered question is asked again
    renew_s: float = 1.0
    probe_s: float = (
        0.5  # a producer that owes an answer for so long: is there a process, does its machine answer?
    )
    silent_s: float = 2.0  # the longest wait for what a peer may never say
    margin_s: float = 0.5  # what a process that has ended had sent has certainly been received after so long
    keep_link_s: float = 600.0  # with a peer that nothing goes to: it may be gone for good
    # A transfer is given up that would take so much longer than computing what is missing here.
    patience_s: float = 1.0
    pace_s: float = (
        0.5  # a link's pace is measured over at least so long, and a shorter wait is not spoken of
    )
    tell_pace_s: float = 0.25  # a consumer is told no more often of a slow link
    keep_pace_s: float = 5.0  # and for so long begins no transfer there that would be given up
    progress_s: float = 0.002  # a consumer is told no more often of what has arrived
    tick_s: float = 0.05  # deadlines are looked at this often while there are any
    # One write or read; larger ones are split, so that a lease is checked in between.
    max_post_bytes: int = 32 << 20
    # Over a slow link: what it moves in `post_s`, and no more in flight than in `link_s`, so that its pace is seen early.
    min_post_bytes: int = 1 << 20
    post_s: float = 0.1
    link_s: float = 1.0
    # All writes, or all reads, that are in flight between two nodes. They cannot be taken back: over a slow link this
    # is how long a transfer that was given up keeps its blocks.
    max_link_bytes: int = 64 << 20
    max_post_runs: int = (
        16_384  # descriptors of one post, where a block is not one run of bytes on both sides
    )
    layerwise_posts: int = 10  # a chunk that goes layer by layer is split into about so many writes
    max_wrong: int = 3  # transfers that arrived wrong before a node is left out, for as long as `keep_link_s`
    # Registrations without a request: how many, and of how many blocks in all, those that are not kept included.
    max_early_registrations: int = 4096
    max_early_places: int = 4 << 20
    max_remembered: int = 16_384  # ids of closed transfers

    def grains_of_a_post(self, grain_bytes: int, runs: int, bytes_per_s: float | None) -> int:
        """`bytes_per_s`: of the link, if it was ever measured."""
        most = self.max_post_bytes
        if bytes_per_s is not None:
            most = min(most, max(self.min_post_bytes, int(bytes_per_s * self.post_s)))
        return max(1, min(most // grain_bytes, self.max_post_runs // runs))

    def bytes_of_a_link(self, post_bytes: int, bytes_per_s: float | None) -> int:
        if bytes_per_s is None:
            return self.max_link_bytes
        return min(self.max_link_bytes, max(2 * post_bytes, int(bytes_per_s * self.link_s)))

    @property
    def remember_s(self) -> float:
        """How long a closed transfer's id is remembered: longer than any message about it can be late."""
        return 2 * (self.timeout_s + self.lease_s)

    @classmethod
    def from_config(cls, config: TransferConfig) -> ProtocolSettings:
        for name in ("lease_s", "timeout_s", "handshake_timeout_s"):
            if not getattr(config, name) > 0:
                raise ConfigurationError(f"transfer.{name} must be above 0, not {getattr(config, name)}")
        if config.lease_s > MAX_LEASE_S:
            raise ConfigurationError(
                f"transfer.lease_s must be at most {MAX_LEASE_S:g}, not {config.lease_s:g}"
            )
        return cls(
            lease_s=config.lease_s,
            timeout_s=config.timeout_s,
            handshake_timeout_s=config.handshake_timeout_s,
            # Three renewals fit into a lease, so that one lost message costs nothing.
            renew_s=min(1.0, config.lease_s / 3),
            probe_s=min(0.5, config.lease_s / 4),
            silent_s=min(2.0, config.lease_s / 2),
            margin_s=max(0.25, config.lease_s / 20),
            retry_s=min(0.25, config.lease_s / 6),
            # A request that would fail without its KV waits for it.
            patience_s=config.patience_s if config.on_failure is LoadFailurePolicy.RECOMPUTE else math.inf,
        )


class ProtocolOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # From so many tokens in a step on, their KV leaves while the step is computed, a few layers at a time; 0 is never.
    # Less than that is sent within a millisecond or two, which the extra messages and descriptors would cost as well.
    layerwise_tokens: int = 128


Options = TypeVar("Options", bound=ProtocolOptions)
Value = TypeVar("Value")


def parse_options(kind: type[Options], connector: str, options: Mapping[str, str]) -> Options:
    try:
        parsed = msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"transfer.options of the {connector} connector: {error}") from None
    if parsed.layerwise_tokens < 0:
        raise ConfigurationError(
            f"transfer.options.layerwise_tokens must be at least 0, not {parsed.layerwise_tokens}"
        )
    return parsed


def parse_direction(direction: str) -> Direction:
    try:
        return Direction(direction)
    except ValueError:
        known = ", ".join(direction.value for direction in Direction)
        raise ConfigurationError(f"transfer.direction must be one of {known}, not {direction!r}") from None


Send = Callable[[str, msgspec.Struct], None]
"""To an endpoint. Never blocks."""

Forget = Callable[[str], None]
"""No process is at this endpoint any more, or none that we still talk to: nothing is kept for it."""


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


class BoundedMemory(Generic[Value]):
    """A bounded memory of things that are over, so that what comes late is recognised as late."""

    def __init__(self, limit: int, seconds: float, clock: Clock) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, Value]] = OrderedDict()

    def add(self, key: str, value: Value) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._seconds, value)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: str) -> Value | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        expires, value = entry
        if expires <= self._clock():
            del self._entries[key]
            return None
        return value


class TransferEnd(msgspec.Struct, frozen=True):
    """How a transfer ended, for those who ask late."""

    reason: str
    handed_over: bool = False


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
                self.back_to(question), transfer_id, ending.reason, handed_over=ending.handed_over
            ),
        )

    def refuse_epoch(self, question: Envelope) -> None:
        """Another incarnation was addressed. Our own epoch is a secret, and the sender has not shown that it knows it."""
        self._recorder.refused(RefusalCode.WRONG_EPOCH.value)
        envelope = msgspec.structs.replace(self.back_to(question), sender_epoch=0)
        reason = "another incarnation of this node was addressed"
        self.say(
            question,
            Refusal(envelope, "", RefusalCode.WRONG_EPOCH, reason, addressed_epoch=question.receiver_epoch),
        )

    def refuse(self, question: Envelope, transfer_id: str, code: RefusalCode, reason: str) -> None:
        self._recorder.refused(code.value)
        self.say(
            question,
            Refusal(
                self.back_to(question), transfer_id, code, reason, addressed_epoch=question.receiver_epoch
            ),
        )
