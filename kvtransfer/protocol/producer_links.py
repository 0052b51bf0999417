"""What a consumer knows of its producers (handshake, stamps, silence, one link for each incarnation), and how it tells them of
its blocks: registrations and leases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tandem.kvtransfer.protocol.cache_map import Mapping
from tandem.kvtransfer.protocol.checksums import every_of
from tandem.kvtransfer.protocol.identity import BoundedMemory, PeerKey
from tandem.kvtransfer.protocol.pace import LinkPace
from tandem.kvtransfer.protocol.receiving import IncomingTransfer, ReceivePhase
from tandem.kvtransfer.protocol.side import NodeSide
from tandem.wire.handoff import CacheMemory, Hello, ProcessIdentity, RegisterDestination, RenewLease
from tandem.wire.nodes import PeerAddress


@dataclasses.dataclass(slots=True)
class ProducerLink:
    peer: PeerAddress
    greeting_since: float | None  # None: the handshake is done
    asked_at: float = 0.0  # the last Hello or RenewLease
    # Since when an answer has been owed; None when everything that was asked has been answered.
    owed_since: float | None = None
    memory: CacheMemory | None = None
    block_size: int = 0
    mapping: Mapping | None = None  # from our blocks to its
    process: ProcessIdentity | None = None
    heard_at: float | None = None
    lease_s: float = 0.0
    stamp: int = 0
    stamp_at: float = 0.0
    pace: LinkPace | None = None  # where it is slow, or was a moment ago
    tokens_per_s: float | None = None  # at which the producer computes prompts

    @property
    def key(self) -> PeerKey:
        return PeerKey(self.peer.node_id, self.peer.epoch)

    @property
    def is_ready(self) -> bool:
        return self.greeting_since is None

    def owes(self, now: float) -> None:
        if self.owed_since is None:
            self.owed_since = now

    def take_stamp(self, stamp: int, now: float) -> None:
        if stamp > self.stamp:
            self.stamp = stamp
            self.stamp_at = now

    def has_fresh_stamp(self, now: float) -> bool:
        """Fresh enough that a lease from it leaves time to renew."""
        return self.is_ready and now < self.stamp_at + self.lease_s / 2

    @property
    def leases_until(self) -> float:
        """The latest end, by our clock, of a lease that the newest stamp grants."""
        return self.stamp_at + self.lease_s


class ProducerLinks:
    """Producers are told of our memory in the Hello. When it becomes reachable in another way, which is another
    `generation`, they are greeted again, and what is registered from then on goes that way."""

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
        # For a while nothing is begun with those that seem to be gone.
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
        """Nothing has been heard from it for a whole lease, or there is no link with it any more."""
        link = self._links.get(key)
        return (
            link is None or link.heard_at is None or self._clock() >= link.heard_at + self._settings.lease_s
        )

    def reopened(self, memory: CacheMemory) -> None:
        """Our memory is reachable in another way, and every producer is told of it."""
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
        self._suspected.add(f"{key.epoch}/{key.node_id}", reason)
        self.drop(key)

    def suspicion_of(self, key: PeerKey) -> str | None:
        """Why this incarnation seemed to be gone a moment ago; None when it did not."""
        return self._suspected.get(f"{key.epoch}/{key.node_id}")

    def found_wrong(self, key: PeerKey) -> None:
        """Other bytes arrived from this node than it had sent."""
        self._wrong.add(key.node_id, (self._wrong.get(key.node_id) or 0) + 1)
        if self.is_left_out(key):
            self._recorder.left_out(key.node_id, self._clock() + self._settings.keep_link_s)

    def is_doubtful(self, key: PeerKey) -> bool:
        """Other bytes have arrived from this node not long ago."""
        return self._wrong.get(key.node_id) is not None

    def is_left_out(self, key: PeerKey) -> bool:
        """So many of its transfers arrived wrong that nothing is begun with it, until none has for a while."""
        return (self._wrong.get(key.node_id) or 0) >= self._settings.max_wrong

    def silent(self) -> list[ProducerLink]:
        """Those with producers that owe an answer for long."""
        limit = self._clock() - self._settings.probe_s
        return [
            link for link in self._links.values() if link.owed_since is not None and link.owed_since < limit
        ]

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
        self._send(
            link.peer.endpoint, RenewLease(self._me.envelope(link.peer.epoch), link.stamp, transfer_ids)
        )


class Registrar:
    """`receivings` lists the transfers with one producer. `unreachable` is called when it does not even answer a
    handshake, or gives no fresh stamp."""

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
        """Register it, if the handshake is done and a fresh stamp is there; else ask for what is missing."""
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
        """Register it again, if the answer is overdue."""
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
            link.owed_since = None  # what it may still owe is not waited for
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
        receiving.process = link.process
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
