"""What a controller knows of machines and processes at one moment. With the recorded state it is all that decisions are made from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tandem.cluster.launcher import Host
from tandem.cluster.pools.supervisor import MAX_START_FAILURES, ProcessPhase
from tandem.wire.nodes import NodeInfo, RouterInfo, RouterQueue
from tandem.wire.requests import NodeStatus


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    phase: ProcessPhase
    detail: str  # the reason for the phase
    restarts: int
    served_s: (
        float | None
    )  # for how long it has served new requests without a break, by its last answer; None: it does not

    @property
    def keeps_failing(self) -> bool:
        return self.phase is ProcessPhase.LEFT_OUT or self.restarts >= MAX_START_FAILURES

    @property
    def is_settled(self) -> bool:
        """Whether waiting for it to become ready, or to stay so, is over or in vain."""
        return self.phase in (ProcessPhase.READY, ProcessPhase.LEFT_OUT) or (
            self.phase in (ProcessPhase.STARTING, ProcessPhase.RESTARTING) and self.restarts >= MAX_START_FAILURES
        )


@dataclass(frozen=True, slots=True)
class NodeFacts(ProcessFacts):
    info: NodeInfo | None  # as it announced itself
    status: NodeStatus | None  # the last one that it reported

    @property
    def may_serve(self) -> bool:
        return self.phase.may_serve(self.info)


@dataclass(frozen=True, slots=True)
class RouterFacts(ProcessFacts):
    info: RouterInfo | None  # as it last announced itself
    load: RouterQueue  # as it last reported


@dataclass(frozen=True, slots=True)
class Facts:
    now: float
    hosts: Sequence[Host]  # machines that are there; some may only be heard, by their processes' witnesses
    unseen: Collection[str]  # names of machines that this controller never saw: nothing can be started there
    nodes: Mapping[str, NodeFacts]  # by name: those that this controller supervises
    routers: Mapping[str, RouterFacts]

    def is_ready(self, name: str) -> bool:
        return self._phase(name) is ProcessPhase.READY

    def serves(self, name: str) -> bool:
        phase = self._phase(name)
        return phase is not None and phase.serves

    def _phase(self, name: str) -> ProcessPhase | None:
        process = self.nodes.get(name) or self.routers.get(name)
        return process.phase if process is not None else None

    @property
    def statuses(self) -> list[NodeStatus]:
        """What the serving nodes last reported."""
        return [
            node.status for node in self.nodes.values() if node.phase is ProcessPhase.READY and node.status is not None
        ]

    @property
    def longest_wait_s(self) -> float:
        """How long the oldest request has waited in a router for room on a node."""
        return max((router.load.oldest_wait_s for router in self.routers.values()), default=0.0)
