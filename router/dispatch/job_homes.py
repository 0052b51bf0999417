"""Which nodes pin the last turn of a job, as they were announced: its next turn goes there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tandem.wire.nodes import NodeInfo

REMEMBERED_JOBS = 16384


class JobHomes:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By job: the nodes, and until when.
        self._homes: OrderedDict[str, tuple[frozenset[str], float]] = OrderedDict()

    def remember(self, job_id: str, nodes: Sequence[NodeInfo], *, is_last_step: bool) -> None:
        self._homes.pop(job_id, None)
        pinning = {node.node_id: node.pin_seconds for node in nodes if node.pin_seconds}
        if pinning and not is_last_step:
            self._homes[job_id] = frozenset(pinning), self._clock() + max(pinning.values())
            if len(self._homes) > REMEMBERED_JOBS:
                self._homes.popitem(last=False)

    def of(self, job_id: str | None) -> frozenset[str]:
        """Empty when no pin is known or it has ended."""
        nodes, until = self._homes.get(job_id, (frozenset(), 0.0)) if job_id is not None else (frozenset(), 0.0)
        return nodes if self._clock() < until else frozenset()
