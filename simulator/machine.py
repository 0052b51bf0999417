"""A machine that several simulated nodes share. While more than one of them computes, each is slower."""

from __future__ import annotations

from typing import Protocol


class SharingNode(Protocol):
    def on_pace(self, pace: float) -> None:
        """`pace`: how many times as long as on a machine of the node's own a step takes from now on."""


class SharedMachine:
    def __init__(self) -> None:
        # The nodes that compute, and how many times as long each takes while one other computes
        self._busy: dict[SharingNode, float] = {}

    def pace(self, node: SharingNode, beside: float) -> float:
        return 1.0 + (beside - 1.0) * (len(self._busy) - (node in self._busy))

    def note(self, node: SharingNode, beside: float, is_busy: bool) -> None:
        """Must be called when a node has begun to compute, or ended: it changes the pace of the others."""
        if is_busy == (node in self._busy):
            return
        if is_busy:
            self._busy[node] = beside
        else:
            del self._busy[node]
        for other, slowdown in list(self._busy.items()):
            if other is not node:
                other.on_pace(self.pace(other, slowdown))
