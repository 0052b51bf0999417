"""The consumer compares what came with the checksums that the producer took, before anything uses it."""

from __future__ import annotations

from tandem.kvtransfer.protocol.checksums import unpack
from tandem.kvtransfer.protocol.receiving import Receiving
from tandem.kvtransfer.protocol.side import Side


class Verifier:
    def __init__(self, side: Side) -> None:
        self._checksums = side.checksums
        self._recorder = side.recorder

    def problem(self, receiving: Receiving, start: int, end: int, packed: bytes) -> str | None:
        """Why the grains from `start` to `end` are not what was sent; None when they are, and then they count as arrived.
        `packed` has a checksum for each of them that carries one. What was compared before is not compared again."""
        mapping = receiving.mapping
        if mapping is None:
            return "it was never registered"
        places, expected = receiving.sample.between(start, end), unpack(packed)
        if len(places) != len(expected):
            return f"{len(expected)} checksums came for {len(places)} blocks"
        known = sum(place < receiving.num_arrived for place in places)
        places, expected = places[known:], expected[known:]
        blocks, parts = receiving.where(places)
        found = self._checksums.of(blocks, parts, mapping) if places else []
        for place, block, right, got in zip(places, blocks, expected, found, strict=True):
            if right != got:
                receiving.num_arrived = max(receiving.num_arrived, min(place, end))
                self._recorder.wrong_kv(receiving.peer.node_id)
                return f"block {block} arrived from {receiving.peer.node_id} with other bytes than were sent"
        self._recorder.checked(len(places))
        receiving.num_arrived = max(receiving.num_arrived, end)
        return None
