"""What each side of a transfer knows of the nodes on the other side: one link for each incarnation. The producer has
links with consumers that said Hello and whose cache fits. The consumer has links with producers: handshake, stamps,
silence. It also registers its blocks and renews its leases here."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator

import msgspec

from tandem.base.errors import TransferError
from tandem.kvtransfer.protocol.cache_map import Mapping, PoolGeometry
from tandem.kvtransfer.protocol.checksums import every_of
from tandem.kvtransfer.protocol.receiving import IncomingTransfer, ReceivePhase
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import BoundedMemory, Clock, Forget, LinkMeter, LinkPace, NodeSide, PeerKey, key_of
from tandem.kvtransfer.protocol.transport import RemoteId, Transport
from tandem.wire.handoff import CacheMemory, Hello, ProcessIdentity, RefusalCode, RegisterDestination, RenewLease
from tandem.wire.nodes import PeerAddress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class ConsumerLink:
    key: PeerKey
    endpoint: str
    hello: Hello
    mapping: Mapping  # between our blocks and the consumer's
    remote: RemoteId | None  # None with pull: the consumer reads, and we move nothing
    last_heard: float
    meter: LinkMeter
    pace_told_at: float = -math.inf
    has_failed: bool = False  # a move failed: disconnecting stops what is in flight


class Rejection(msgspec.Struct, frozen=True):
    code: RefusalCode
    reason: str


class ConsumerLinks:
    """The producer's links with consumers. A consumer whose memory became reachable in another way says Hello again.
    Later registrations use the new link; earlier ones go on through the old link."""

    def __init__(
        self,
        geometry: PoolGeometry,
        transport: Transport | None,
        settings: ProtocolSettings,
        clock: Clock,
        *,
        forget: Forget,
    ) -> None:
        self._geometry = geometry
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._forget = forget
        self._links: dict[PeerKey, ConsumerLink] = {}
        # Links that no new transfer uses, while transfers that have begun may still need them.
        self._leaving: list[ConsumerLink] = []
        self._ended: BoundedMemory[bool] = BoundedMemory(settings.max_remembered, settings.remember_s, clock)

    def __iter__(self) -> Iterator[ConsumerLink]:
        return iter(list(self._links.values()))

    def get(self, key: PeerKey) -> ConsumerLink | None:
        return self._links.get(key)

    def hear(self, key: PeerKey) -> ConsumerLink | None:
        link = self._links.get(key)
        if link is not None:
            link.last_heard = self._clock()
        return link

    def welcome(self, hello: Hello) -> Rejection | None:
        """Makes or confirms the link and returns None, or returns why there is no link."""
        key = key_of(hello.envelope)
        if self.has_ended(key):
            return Rejection(RefusalCode.HANDSHAKE_FAILED, "this incarnation is known to have ended")
        link = self.hear(key)
        if link is not None and link.hello.memory == hello.memory:
            return None
        mapping = self._geometry.mapping_to(hello.fingerprint, hello.memory)
        if not isinstance(mapping, Mapping):
            logger.error("%s cannot receive KV from here: %s", key.node_id, mapping)
            return Rejection(RefusalCode.INCOMPATIBLE, mapping)
        if any(leaving.has_failed and leaving.key == key for leaving in self._leaving):
            return Rejection(RefusalCode.HANDSHAKE_FAILED, "an earlier link with this node is still being closed")
        remote: RemoteId | None = None
        if self._transport is not None:
            try:
                remote = self._transport.connect(hello.memory)
            except TransferError as error:
                logger.error("cannot reach the KV memory of %s: %s", key.node_id, error)
                return Rejection(RefusalCode.HANDSHAKE_FAILED, str(error))
        if link is not None:
            self._leave(link)
        meter = LinkMeter(self._settings.pace_s)
        self._links[key] = ConsumerLink(key, hello.envelope.reply_to, hello, mapping, remote, self._clock(), meter)
        return None

    def mark_ended(self, key: PeerKey) -> None:
        """This incarnation has certainly ended."""
        self._ended.add(key, True)
        link = self._links.get(key)
        if link is not None:
            self._forget(link.endpoint)
            self.fail(link)

    def has_ended(self, key: PeerKey) -> bool:
        return self._ended.get(key) is not None

    def fail(self, link: ConsumerLink) -> None:
        """Nothing more goes through this link, and what does not end by itself is stopped."""
        link.has_failed = True
        if link not in self._leaving:
            self._leave(link)

    def leave_all(self) -> None:
        for link in self:
            self._leave(link)

    def _leave(self, link: ConsumerLink) -> None:
        if self._links.get(link.key) is link:
            del self._links[link.key]
        if link.remote is not None:
            self._leaving.append(link)

    def drop_unused(self, greeted: PeerKey, in_use: Callable[[ConsumerLink], bool]) -> None:
        """Drops unused links with consumers that have been silent for long, and with other incarnations of the node
        that said Hello. A node that leaves for good does not say so. A Hello does not prove that another incarnation
        has ended, so transfers to that one go on until its lease ends."""
        limit = self._clock() - self._settings.keep_link_s
        for link in self:
            other = link.key.node_id == greeted.node_id and link.key != greeted
            if (other or link.last_heard < limit) and not in_use(link):
                del self._links[link.key]
                if other:
                    self._forget(link.endpoint)
                self._disconnect(link)

    def is_leaving(self, link: ConsumerLink) -> bool:
        return link in self._leaving

    def close_idle(self, in_use: Callable[[ConsumerLink], bool]) -> None:
        """Disconnects leaving links that no transfer needs any more, but none that may still write."""
        for link in list(self._leaving):
            if in_use(link):
                continue
            if link.has_failed and self._transport is not None and link.remote is not None:
                self._transport.stop_writing(link.remote)
            if not self.may_still_write(link):
                self._leaving.remove(link)
                self._disconnect(link)

    def may_still_write(self, link: ConsumerLink) -> bool:
        if self._transport is None or link.remote is None or not link.has_failed:
            return False
        return self._transport.may_still_write(link.remote)

    def _disconnect(self, link: ConsumerLink) -> None:
        if self._transport is not None and link.remote is not None:
            self._transport.disconnect(link.remote)

    @property
    def has_leaving(self) -> bool:
        return bool(self._leaving)


class LeaseStamps:
    """A stamp is a reading of our own clock, so the producer need not remember which stamps it issued."""

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self._lease_s = lease_s
        self._clock = clock

    def issue(self) -> int:
        return int(self._clock() * 1e6)

    def until(self, stamp: int) -> float | None:
        """Returns until when a lease from this stamp holds; None if it has ended, or if we never issued the stamp."""
        issued = stamp / 1e6
        until = issued + self._lease_s
        return until if issued <= self._clock() < until else None


@dataclasses.dataclass(slots=True)
class ProducerLink:
    peer: PeerAddress
    greeting_since: float | None  # None: the handshake is done
    asked_at: float = 0.0  # when we sent the last Hello or RenewLease
    # Since when the producer has owed an answer; None if it has answered every question.
    owed_since: float | None = None
    memory: CacheMemory | None = None
    block_size: int = 0
    mapping: Mapping | None = None  # between our blocks and the producer's
    process: ProcessIdentity | None = None
    heard_at: float | None = None
    lease_s: float = 0.0
    stamp: int = 0
    stamp_at: float = 0.0
    pace: LinkPace | None = None  # set while the link is slow, and for a while after
    tokens_per_s: float | None = None  # the producer's rate for prompt tokens

    @property
    def key(self) -> PeerKey:
        return PeerKey(self.peer.node_id, self.peer.epoch)

    @property
    def is_ready(self) -> bool:
        return self.greeting_since is None

    @property
    def processes(self) -> frozenset[ProcessIdentity]:
        """All processes that write to our memory. If the producer's ranks keep their heads apart, each rank writes."""
        shards = self.memory.shards if self.memory is not None else []
        first = {self.process} if self.process is not None else set()
        return frozenset(first | {shard.process for shard in shards})

    def owes(self, now: float) -> None:
        if self.owed_since is None:
            self.owed_since = now

    def take_stamp(self, stamp: int, now: float) -> None:
        if stamp > self.stamp:
            self.stamp = stamp
            self.stamp_at = now

    def has_fresh_stamp(self, now: float) -> bool:
        """Whether a lease from the newest stamp would leave time to renew it."""
        return self.is_ready and now < self.stamp_at + self.lease_s / 2

    @property
    def leases_until(self) -> float:
        """When a lease from the newest stamp ends at the latest, by our clock."""
        return self.stamp_at + self.lease_s


class ProducerLinks:
    """The consumer's links with producers. The Hello tells a producer how to reach our memory. When it becomes
    reachable in another way, which is another `generation`, we say Hello again, and later registrations use that
    way."""

    def __init__(self, side: NodeSide) -> None:
        self._me = side.me
        self._fingerprint = side.geometry.fingerprint
        self._memory = side.geometry.memory
        self._process = side.process
        self._settings = side.settings
        self._send = side.send
        self._forget = side.forget
        self._clock = side.clock
        self._recorder = side.recorder
        self.generation = 0
        self._links: dict[PeerKey, ProducerLink] = {}
        # Producers that seemed to be gone: nothing is begun with them for a while.
        self._suspected: BoundedMemory[str] = BoundedMemory(
            side.settings.max_remembered, side.settings.handshake_timeout_s, side.clock
        )

        self._wrong: BoundedMemory[int] = BoundedMemory(
            side.settings.max_remembered, side.settings.keep_link_s, side.clock
        )

    def __iter__(self) -> Iterator[ProducerLink]:
        return iter(list(self._links.values()))

    def get(self, key: PeerKey) -> ProducerLink | None:
        return self._links.get(key)

    def hear(self, key: PeerKey) -> ProducerLink | None:
        link = self._links.get(key)
        if link is not None:
            link.owed_since = None
            link.heard_at = self._clock()
        return link

    def is_silent(self, key: PeerKey) -> bool:
        """True if the producer has said nothing for a whole lease, or if there is no link with it."""
        link = self._links.get(key)
        return link is None or link.heard_at is None or self._clock() >= link.heard_at + self._settings.lease_s

    def reopened(self, memory: CacheMemory) -> None:
        """Our memory is reachable in another way: tell every producer."""
        self._memory = memory
        self.generation += 1
        for link in self._links.values():
            link.greeting_since = self._clock()
            self.greet(link)

    def open(self, peer: PeerAddress) -> ProducerLink:
        link = ProducerLink(peer, greeting_since=self._clock())
        self._links[link.key] = link
        self.greet(link)
        return link

    def drop(self, key: PeerKey) -> None:
        link = self._links.pop(key, None)
        if link is not None:
            self._forget(link.peer.endpoint)

    def suspect(self, key: PeerKey, reason: str) -> None:
        self._suspected.add(key, reason)
        self.drop(key)

    def suspicion_of(self, key: PeerKey) -> str | None:
        """Returns why this incarnation seemed to be gone a moment ago; None if it did not."""
        return self._suspected.get(key)

    def found_wrong(self, key: PeerKey) -> None:
        """Other bytes arrived from this node than it had sent."""
        self._wrong.add(key.node_id, (self._wrong.get(key.node_id) or 0) + 1)
        if self.is_left_out(key):
            self._recorder.left_out(key.node_id, self._clock() + self._settings.keep_link_s)

    def is_doubtful(self, key: PeerKey) -> bool:
        """Whether wrong bytes have arrived from this node not long ago."""
        return self._wrong.get(key.node_id) is not None

    def is_left_out(self, key: PeerKey) -> bool:
        """Whether `max_wrong` of its transfers arrived wrong: nothing is begun with it, until none has for a while."""
        return (self._wrong.get(key.node_id) or 0) >= self._settings.max_wrong

    def silent(self) -> list[ProducerLink]:
        """Returns the links with producers that have owed an answer for `probe_s`."""
        limit = self._clock() - self._settings.probe_s
        return [link for link in self._links.values() if link.owed_since is not None and link.owed_since < limit]

    # ── questions ──

    def greet(self, link: ProducerLink) -> None:
        link.asked_at = self._clock()
        link.owes(link.asked_at)
        self._send(
            link.peer.endpoint,
            Hello(self._me.envelope(link.peer.epoch), self._fingerprint, self._memory, self._process),
        )

    def renew(self, link: ProducerLink, transfer_ids: list[str]) -> None:
        link.asked_at = self._clock()
        link.owes(link.asked_at)
        self._send(link.peer.endpoint, RenewLease(self._me.envelope(link.peer.epoch), link.stamp, transfer_ids))


class Registrar:
    """Registers a consumer's blocks with producers, and renews their leases.

    `receivings` lists the transfers with one producer. `unreachable` is called if a producer does not answer the
    handshake, or gives no fresh stamp.
    """

    def __init__(
        self,
        side: NodeSide,
        links: ProducerLinks,
        *,
        receivings: Callable[[PeerKey], list[IncomingTransfer]],
        unreachable: Callable[[ProducerLink, str], None],
    ) -> None:
        self._side = side
        self._me = side.me
        self._links = links
        self._settings = side.settings
        self._send = side.send
        self._clock = side.clock
        self._receivings = receivings
        self._unreachable = unreachable

    def advance_all(self, link: ProducerLink) -> None:
        for receiving in self._receivings(link.key):
            self.advance(receiving)

    def advance(self, receiving: IncomingTransfer) -> None:
        """Registers the transfer if the handshake is done and there is a fresh stamp; else asks for what is missing."""
        link = self._links.get(receiving.peer)
        if receiving.stage is not ReceivePhase.CONNECTING or link is None or not link.is_ready:
            return
        now = self._clock()
        if receiving.connected_at is None:
            receiving.connected_at = now
        if link.has_fresh_stamp(now):
            receiving.stage = ReceivePhase.REGISTERING
            self._register(receiving, link)
        elif link.owed_since is None:
            self._renew(link)

    def remind(self, receiving: IncomingTransfer) -> None:
        """Registers the transfer again if the answer is overdue."""
        link = self._links.get(receiving.peer)
        now = self._clock()
        overdue = now >= receiving.asked_at + self._settings.retry_s
        if link is None or receiving.stage is not ReceivePhase.REGISTERING or not overdue:
            return
        if link.has_fresh_stamp(now):
            self._register(receiving, link)
        elif link.is_ready and now >= link.asked_at + self._settings.retry_s:
            self._renew(link)

    def tick(self, link: ProducerLink) -> None:
        now = self._clock()
        stages = {receiving.stage for receiving in self._receivings(link.key)}
        if not stages:
            link.owed_since = None  # no transfer waits for its answers
            if not link.is_ready:
                self._links.drop(link.key)
            return
        waiting_since = link.greeting_since if link.greeting_since is not None else link.owed_since
        too_late = waiting_since is not None and now >= waiting_since + self._settings.handshake_timeout_s
        if too_late and ReceivePhase.CONNECTING in stages:
            self._unreachable(link, "the producer did not answer the handshake")
            return
        ask_again = now >= link.asked_at + self._settings.retry_s
        if not link.is_ready and ask_again:
            self._links.greet(link)
        if link.stamp and any(stage.is_leased for stage in stages):
            if now >= link.asked_at + self._settings.renew_s:
                self._renew(link)
        elif link.is_ready and ReceivePhase.CONNECTING in stages and ask_again:
            self._renew(link)

    def _register(self, receiving: IncomingTransfer, link: ProducerLink) -> None:
        command = receiving.command
        receiving.asked_at = self._clock()
        receiving.extend_lease(link.leases_until)
        receiving.generation = self._links.generation
        receiving.processes = link.processes
        if link.mapping is not None:
            receiving.know_mapping(link.mapping, self._checksum_every(link))
        link.owes(receiving.asked_at)
        self._send(
            link.peer.endpoint,
            RegisterDestination(
                self._me.envelope(link.peer.epoch),
                link.stamp,
                command.transfer_id,
                command.num_tokens,
                command.token_hash,
                command.first_block,
                command.block_ids,
                receiving.sample.every,
            ),
        )

    def _checksum_every(self, link: ProducerLink) -> int:
        return every_of(self._side.checksum_policy, is_doubtful=self._links.is_doubtful(link.key))

    def _renew(self, link: ProducerLink) -> None:
        held = [receiving for receiving in self._receivings(link.key) if receiving.stage.is_leased]
        for receiving in held:
            receiving.extend_lease(link.leases_until)
        self._links.renew(link, [receiving.transfer_id for receiving in held])
