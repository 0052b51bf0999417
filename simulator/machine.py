"""A machine, or cores, that several simulated nodes share. While more than one of them computes, each is slower."""

from __future__ import annotations

from collections.abc import Collection
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

    def note(self, node: SharingNode, slowdown: float | None) -> None:
        """Must be called with every step that a node begins, and with None when it has none: its first step after a pause slows the
        others."""
        was_busy = node in self._busy
        if slowdown is not None:
            self._busy[node] = slowdown
        elif was_busy:
            del self._busy[node]
        if was_busy is (slowdown is None):
            for other, its_slowdown in list(self._busy.items()):
                if other is not node:
                    other.on_pace(self.pace(other, its_slowdown))


class SharedCores(SharedMachine):
    """Cores, to which nodes are bound. A step waits for the busiest core of its node, whose time all that compute there share."""

    def __init__(self) -> None:
        super().__init__()
        self._cores: dict[SharingNode, Collection[str]] = {}

    def bind(self, node: SharingNode, cores: Collection[str]) -> None:
        self._cores[node] = cores

    def pace(self, node: SharingNode, slowdown: float) -> float:
        others = [self._cores[other] for other in self._busy if other is not node]
        return 1.0 + max((sum(core in other for other in others) for core in self._cores[node]), default=0)
