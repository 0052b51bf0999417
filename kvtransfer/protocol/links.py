"""What a consumer knows of its producers: handshake, stamps, silence. One link for each incarnation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tandem.kvtransfer.protocol.geometry import PoolGeometry
from tandem.kvtransfer.protocol.identity import Clock, Identity, PeerKey, Remembered
from tandem.kvtransfer.protocol.mapping import Mapping
from tandem.kvtransfer.protocol.settings import Settings
from tandem.kvtransfer.protocol.side import Forget, Send
from tandem.wire.handoff import CacheMemory, Hello, RenewLease
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
    lease_s: float = 0.0
    stamp: int = 0
    stamp_at: float = 0.0

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
    def __init__(
        self,
        me: Identity,
        geometry: PoolGeometry,
        settings: Settings,
        clock: Clock,
        *,
        send: Send,
        forget: Forget,
    ) -> None:
        self._me = me
        self._geometry = geometry
        self._settings = settings
        self._send = send
        self._forget = forget
        self._clock = clock
        self._links: dict[PeerKey, ProducerLink] = {}
        self._dead: Remembered[str] = Remembered(settings.max_remembered, settings.remember_s, clock)

    def __iter__(self) -> Iterator[ProducerLink]:
        return iter(list(self._links.values()))

    def get(self, key: PeerKey) -> ProducerLink | None:
        return self._links.get(key)

    def hear(self, key: PeerKey) -> ProducerLink | None:
        link = self._links.get(key)
        if link is not None:
            link.owed_since = None
        return link

    def open(self, peer: PeerAddress) -> ProducerLink:
        link = ProducerLink(peer, greeting_since=self._clock())
        self._links[link.key] = link
        self.greet(link)
        return link

    def drop(self, key: PeerKey) -> None:
        link = self._links.pop(key, None)
        if link is not None:
            self._forget(link.peer.endpoint)

    def mark_dead(self, key: PeerKey, reason: str) -> None:
        self._dead.add(f"{key.epoch}/{key.node_id}", reason)
        self.drop(key)

    def death_of(self, key: PeerKey) -> str | None:
        """Why it is certain that this incarnation does not run any more; None when it is not."""
        return self._dead.get(f"{key.epoch}/{key.node_id}")

    def silent(self) -> list[tuple[PeerKey, str]]:
        """Producers that owe an answer for long: (who, endpoint)."""
        limit = self._clock() - self._settings.silent_s
        return [
            (link.key, link.peer.endpoint)
            for link in self._links.values()
            if link.owed_since is not None and link.owed_since < limit
        ]

    # ── questions ──

    def greet(self, link: ProducerLink) -> None:
        link.asked_at = self._clock()
        link.owes(link.asked_at)
        self._send(
            link.peer.endpoint,
            Hello(self._me.envelope(link.peer.epoch), self._geometry.fingerprint, self._geometry.memory),
        )

    def renew(self, link: ProducerLink, transfer_ids: list[str]) -> None:
        link.asked_at = self._clock()
        link.owes(link.asked_at)
        self._send(
            link.peer.endpoint, RenewLease(self._me.envelope(link.peer.epoch), link.stamp, transfer_ids)
        )
