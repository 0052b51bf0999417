"""What a consumer knows of one incarnation of a producer."""

from __future__ import annotations

import dataclasses

from kvtransfer.protocol.identity import PeerKey
from kvtransfer.protocol.transport import RemoteId
from wire.handoff import CacheMemory
from wire.nodes import PeerAddress


@dataclasses.dataclass(slots=True)
class ProducerLink:
    peer: PeerAddress
    greeting_since: float | None  # None: the handshake is done
    asked_at: float = 0.0  # the last Hello or RenewLease
    # Since when an answer has been owed; None when everything that was asked has been answered.
    owed_since: float | None = None
    memory: CacheMemory | None = None
    remote: RemoteId | None = None  # pull
    lease_s: float = 0.0
    stamp: int = 0
    stamp_at: float = 0.0

    @property
    def key(self) -> PeerKey:
        return PeerKey(self.peer.node_id, self.peer.epoch)

    @property
    def is_ready(self) -> bool:
        return self.greeting_since is None

    def ask(self, now: float) -> None:
        self.asked_at = now
        if self.owed_since is None:
            self.owed_since = now

    def heard(self) -> None:
        self.owed_since = None

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
