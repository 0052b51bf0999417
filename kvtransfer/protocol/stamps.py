"""What a producer's leases are counted from: see wire.handoff on stamps."""

from __future__ import annotations

from tandem.kvtransfer.protocol.identity import Clock


class LeaseStamps:
    """A stamp is our own clock, so that nothing has to be remembered of those that were issued."""

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self._lease_s = lease_s
        self._clock = clock

    def issue(self) -> int:
        return int(self._clock() * 1e6)

    def until(self, stamp: int) -> float | None:
        """Until when a lease that this stamp grants holds; None if that is over, or it was never issued."""
        issued = stamp / 1e6
        until = issued + self._lease_s
        return until if issued <= self._clock() < until else None
