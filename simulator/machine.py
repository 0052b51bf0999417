"""A machine that several simulated nodes share. While more than one of them computes, each is slower."""

from __future__ import annotations

from typing import Protocol


class SharingNode(Protocol):
    def on_pace(self, pace: float) -> None:
        """`pace`: how many times as long as on a machine of the node's own a step takes from now on."""


class SharedMachine:
    def __init__(self) -> None:
        # The nodes that compute, and how many times as long the step of each takes while one other computes
        self._busy: dict[SharingNode, float] = {}

    def pace(self, node: SharingNode, slowdown: float) -> float:
        return 1.0 + (slowdown - 1.0) * (len(self._busy) - (node in self._busy))

    def begins(self, node: SharingNode, slowdown: float) -> None:
        """Must be called with every step that a node begins: the first one after a pause slows the others."""
        was_busy = node in self._busy
        self._busy[node] = slowdown
        if not was_busy:
            self._tell_others(node)

    def rests(self, node: SharingNode) -> None:
        """Must be called when a node has nothing to compute."""
        if self._busy.pop(node, None) is not None:
            self._tell_others(node)

    def _tell_others(self, node: SharingNode) -> None:
        for other, slowdown in list(self._busy.items()):
            if other is not node:
                other.on_pace(self.pace(other, slowdown))
