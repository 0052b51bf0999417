"""Observes nodes and routers during a rollout: which of them serve, and which new ones fail."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.cluster.config import TandemConfig
from tandem.cluster.launcher import Host
from tandem.cluster.pools.fleet import Fleet
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.rollouts.steps import NO_MACHINE, RolloutFacts
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.pools.supervisor import MAX_START_FAILURES, ProcessPhase
from tandem.cluster.tasks import Clock
from tandem.wire.nodes import Role

# A new node or router has failed when it has this many errors of its own and they are more than this share of its finished requests.
LEAST_ERRORS, MOST_ERRORS = 3, 0.05


class RolloutWatch:
    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._ready_since: dict[str, float] = {}  # of new nodes and routers
        self._unfit_since: dict[Role, float] = {}  # since when no machine has what a pool's new nodes need

    def forget(self) -> None:
        """Call this when a rollout begins and when it is taken back."""
        self._ready_since.clear()
        self._unfit_since.clear()

    def facts(self, state: ClusterState, config: TandemConfig, machines: Sequence[Host]) -> RolloutFacts:
        """`config` is the one that the operator wants."""
        now, number = self._clock.now(), state.revision.number
        ready: set[str] = set()
        idle: set[str] = set()
        failed: dict[str, str] = {}
        for record in state.nodes:
            node = self._fleet.nodes.get(record.node_id)
            if record.leaving:
                continue
            # An announced node may be serving even if this controller has not reached it yet.
            if node is None or record.info is None or node.restarts >= MAX_START_FAILURES:
                idle.add(record.node_id)
            if node is None:
                continue
            if node.phase is not ProcessPhase.READY:
                self._ready_since.pop(record.node_id, None)
            elif (
                record.revision != number
                or now - self._ready_since.setdefault(record.node_id, now) >= config.rollout.settle_s
            ):
                ready.add(record.node_id)
            if record.revision == number and (why := _why_failed(node)):
                failed[record.node_id] = why
        for role in Role:
            if not state.outdated(role) or any(host.could_have(role) for host in machines):
                self._unfit_since.pop(role, None)
            elif now - self._unfit_since.setdefault(role, now) >= config.timeouts.machines_s:
                failed[role.value] = NO_MACHINE.format(role.value)
        outdated = {record.name for record in state.staying_routers if self._fleet.is_outdated(record)}
        places = self._new_places(state, machines)
        settled = set()
        for new in state.staying_routers:
            router = self._fleet.routers.get(new.name)
            if router is None or new.name in outdated or not (state.rollout and state.rollout.routers):
                continue
            places.add(new.place)
            if router.phase is not ProcessPhase.READY or not router.load.accepts:
                self._ready_since.pop(router.name, None)
            elif now - self._ready_since.setdefault(router.name, now) >= config.rollout.settle_s:
                ready.add(router.name)
                settled.add(new.place)
            if why := _why_failed_router(router):
                failed[router.name] = why
                settled.add(new.place)
        return RolloutFacts(
            ready,
            idle - ready,
            outdated,
            failed,
            self._fleet.longest_wait_s(),
            config.slo.ttft_s,
            self._fleet.config.router.processes,
            places - settled,
        )

    def _new_places(self, state: ClusterState, machines: Sequence[Host]) -> set[str]:
        """Returns the places that have a router because this rollout changed `router.placement`."""
        if state.rollout is None or not state.rollout.routers:
            return set()
        before = self._fleet.config_of(state.rollout.before.number).router.placement
        if before is self._fleet.config.router.placement:
            return set()
        there = self._fleet.router_places(machines)
        return {place for place, host in there.items() if place and not self._fleet.is_unseen(host)}


def _why_failed(node: NodeSupervisor) -> str:
    """Returns why a new node has failed; "" if it has not."""
    if node.phase is ProcessPhase.LEFT_OUT or node.restarts >= MAX_START_FAILURES:
        return f"it is {node.phase.value}: {node.detail}"
    if node.status is None:
        return ""
    totals = node.status.totals
    finished = sum(totals.requests_finished.values())
    # An older node counts no clients' errors apart, so there all count.
    errors = totals.requests_finished.get("error", 0) - totals.client_errors
    if _too_many(errors, finished):
        return f"{errors} of its {finished} requests ended with an error of its own"
    return ""


def _why_failed_router(router: RouterSupervisor) -> str:
    if router.phase is ProcessPhase.LEFT_OUT or router.restarts >= MAX_START_FAILURES:
        return f"it is {router.phase.value}: {router.detail}"
    if _too_many(router.load.errors, router.load.answers):
        return (
            f"{router.load.errors} of its {router.load.answers} responses were errors that it caused itself"
        )
    return ""


def _too_many(errors: int, of: int) -> bool:
    return errors >= LEAST_ERRORS and errors > MOST_ERRORS * of
