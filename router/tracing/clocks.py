"""How far each node's monotonic clock is from ours, from round trips: the answer to a ping was written at some moment
between sending and hearing, and the shortest trip leaves the least doubt."""

from __future__ import annotations

from collections import deque

import msgspec

from tandem.wire.tracing import ClockReading

# Half a minute's, at two pings a second. The best of them is fresh enough: clocks drift apart by some 10 µs in a second.
READINGS = 64


class Offset(msgspec.Struct, frozen=True):
    """To be taken off the node's times; right to within `error_s`."""

    seconds: float
    error_s: float


class Clocks:
    def __init__(self) -> None:
        self._readings: dict[tuple[str, int], deque[Offset]] = {}

    def heard(self, reading: ClockReading, now: float) -> None:
        trip = now - reading.asked_at
        if trip < 0:  # not an answer to us
            return
        middle = (now + reading.asked_at) / 2
        readings = self._readings.setdefault((reading.node_id, reading.epoch), deque(maxlen=READINGS))
        readings.append(Offset(reading.clock - middle, trip / 2))

    def offset(self, node_id: str, epoch: int) -> Offset | None:
        """None while nothing is known. On one machine there is one such clock, and readings that allow for that are
        taken to say so: then times are exact."""
        readings = self._readings.get((node_id, epoch))
        if not readings:
            return None
        best = min(readings, key=lambda reading: reading.error_s)
        if all(abs(reading.seconds) <= reading.error_s for reading in readings):
            return Offset(0.0, 0.0)
        return best

    def forget(self, node_id: str, epoch: int) -> None:
        self._readings.pop((node_id, epoch), None)
