"""Bugs of the control plane, put into the product one at a time: the world of the control plane must find each of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from tandem.base.errors import TandemError
from tandem.cluster.pools import state
from tandem.cluster.pools.autoscaling.wing import ScalingPools
from tandem.cluster.pools.controller import Controller
from tandem.cluster.pools.departures import Departures
from tandem.cluster.pools.fleet import Fleet
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.reconciler import Reconciler
from tandem.cluster.pools.rollouts import steps, watch, wing
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.state import ClusterState, Membership, NodeRecord
from tandem.cluster.pools.turn import Turn


def _recorded_after_the_act(right: Any) -> Any:
    """What is wanted is carried out at once, and recorded a little later."""

    async def keep(self: Reconciler, new: ClusterState) -> None:
        self.state = new = msgspec.structs.replace(new, decisions=list(self.decisions))
        self.changed.ring()
        self._tasks.spawn(_record_later(self, new), "record later")

    return keep


async def _record_later(pools: Reconciler, new: ClusterState) -> None:
    await asyncio.sleep(0.05)
    try:
        await pools._turn.save(state.encode(msgspec.structs.replace(new, writer=pools._turn.name)))
    except TandemError:
        return


def _refused_record_stays(right: Any) -> Any:
    async def keep(self: Reconciler, new: ClusterState) -> None:
        self._records = True  # a task that never comes
        await right(self, new)

    return keep


def _judged_by_clients_errors(right: Any) -> Any:
    def why_failed(node: NodeSupervisor) -> str:
        if node.status is not None:
            finished = node.status.totals.requests_finished
            errors = finished.get("error", 0)
            if errors >= watch.LEAST_ERRORS:
                return f"{errors} of its {sum(finished.values())} requests ended with an error of its own"
        return str(right(node))

    return why_failed


def _never_judged(right: Any) -> Any:
    return lambda node: ""


def _departures_forgotten(right: Any) -> Any:
    async def take_over(self: Reconciler) -> None:
        begin, taking_over = self.departures.begin, True

        def forget(node_id: str, *given: Any) -> Any:
            if taking_over:
                self.departures.nodes[node_id] = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
                return None
            return begin(node_id, *given)

        self.departures.begin = forget  # type: ignore[method-assign]
        await right(self)
        taking_over = False

    return take_over


def _rollout_forgotten(right: Any) -> Any:
    def begin_rollout(self: Reconciler, how: str) -> None:
        if how != "goes on":
            right(self, how)

    return begin_rollout


def _drained_node_starts_again(right: Any) -> Any:
    async def end_node(self: Fleet, node_id: str) -> None:
        node = self.nodes.get(node_id)
        await right(self, node_id)
        if node is not None and node.handle is not None:
            node._launch_now()

    return end_node


def _scaled_during_a_rollout(right: Any) -> Any:
    def scaled_pools(self: ScalingPools) -> Any:
        kept = self._pools.state
        self._pools.state = msgspec.structs.replace(kept, rollout=None)
        try:
            return right(self)
        finally:
            self._pools.state = kept

    return scaled_pools


def _sizes_kept_before_the_model_is_known(right: Any) -> Any:
    async def change_config(self: Reconciler, new: ClusterState) -> None:
        await self.keep(msgspec.structs.replace(self.state, sizes=new.sizes))
        await right(self, new)

    return change_config


def _second_apply_taken(right: Any) -> Any:
    async def apply(self: Controller, config: Any, *, dry_run: bool) -> Any:
        kept = self.pools.state
        if kept.rollout is not None and not dry_run:
            self.pools.state = msgspec.structs.replace(kept, rollout=None)
        return await right(self, config, dry_run=dry_run)

    return apply


def _last_node_may_go(right: Any) -> Any:
    return lambda config, state, wanted, role: max(1, right(config, state, wanted, role))


def _old_ones_stay(right: Any) -> Any:
    """A rollout ends as soon as a new node of each pool serves."""

    def next_step(rules: Any, config: Any, state: ClusterState, facts: Any) -> Any:
        step = right(rules, config, state, facts)
        new = [node for node in state.nodes if node.revision == state.revision.number]
        if isinstance(step, steps.Wait) and any(node.node_id in facts.ready for node in new):
            return steps.RolloutEnd()
        return step

    return next_step


def _only_places_with_old_routers_judged(right: Any) -> Any:
    def facts(wanted: Any, config: Any, before: Any, state: ClusterState, *given: Any) -> Any:
        found = right(wanted, config, before, state, *given)
        if found.outdated_routers:
            return found
        routers = {record.name for record in state.routers}
        failed = {name: why for name, why in found.failed.items() if name not in routers}
        return dataclasses.replace(found, failed=failed, coming=frozenset())

    return facts


def _ids_given_again(right: Any) -> Any:
    def with_new_node(self: ClusterState, role: Any) -> ClusterState:
        number = len(self.staying(role))
        state = self.with_node(NodeRecord(f"{role.value}-{number}", role, revision=self.revision.number))
        return msgspec.structs.replace(state, next_index=self.next_index | {role: number + 1})

    return with_new_node


def _machine_gone_at_once(right: Any) -> Any:
    async def may_serve_on(self: Fleet, host: Any) -> bool:
        return False

    return may_serve_on


def _withdrawn_late(right: Any) -> Any:
    async def withdraw(self: Membership, info: Any) -> None:
        return

    return withdraw


def _pauses_not_told(right: Any) -> Any:
    async def pause(self: Membership, names: list[str]) -> None:
        self.paused = names if not names or len(names) < len(self.paused) else self.paused

    return pause


def _without_a_door(right: Any) -> Any:
    return lambda self: ""


def _departed_not_recorded(right: Any) -> Any:
    async def until_kept(self: Departures, change: Any, name: str) -> None:
        await asyncio.Event().wait()

    return until_kept


def _role_not_recorded(right: Any) -> Any:
    async def change_to(self: Reconciler, new: ClusterState, *given: Any) -> None:
        kept, roles = self.keep, {node.node_id: node.role for node in self.state.nodes}

        async def nothing(new: ClusterState) -> None:
            self.state = new

        if any(roles.get(node.node_id, node.role) is not node.role for node in new.nodes):
            self.keep = nothing  # type: ignore[method-assign]
        try:
            await right(self, new, *given)
        finally:
            self.keep = kept  # type: ignore[method-assign]

    return change_to


CONTROL_MUTANTS: dict[str, tuple[str, tuple[Any, str, Callable[[Any], Any]]]] = {
    "recorded-after-the-act": ("what is done is recorded later", (Reconciler, "keep", _recorded_after_the_act)),
    "refused-record-stays": ("an order that was refused is carried out", (Reconciler, "keep", _refused_record_stays)),
    "judged-by-clients": ("clients' errors take a rollout back", (watch, "_why_failed", _judged_by_clients_errors)),
    "nodes-never-judged": ("bad nodes never take a rollout back", (watch, "_why_failed", _never_judged)),
    "routers-never-judged": ("bad routers never take it back", (watch, "_why_failed_router", _never_judged)),
    "departures-forgotten": ("what drained goes on after a restart", (Reconciler, "take_over", _departures_forgotten)),
    "rollout-forgotten": ("a rollout stops with its controller", (Reconciler, "_begin_rollout", _rollout_forgotten)),
    "drained-starts-again": ("a drained node is started again", (Fleet, "end_node", _drained_node_starts_again)),
    "scaled-during-rollout": (
        "pools are resized by load in a rollout",
        (ScalingPools, "_scaled", _scaled_during_a_rollout),
    ),
    "half-an-apply": (
        "a refused apply resizes pools",
        (Reconciler, "change_config", _sizes_kept_before_the_model_is_known),
    ),
    "two-rollouts": ("a second apply is taken in a rollout", (Controller, "apply", _second_apply_taken)),
    "last-node-goes": ("a rollout takes the last node that decodes", (steps, "most_unavailable", _last_node_may_go)),
    "half-a-rollout": ("a rollout ends with old nodes", (steps, "next_step", _old_ones_stay)),
    "only-new-router-unjudged": (
        "the old router ends by itself",
        (wing, "rollout_facts", _only_places_with_old_routers_judged),
    ),
    "ids-given-again": ("an id is given twice", (ClusterState, "with_new_node", _ids_given_again)),
    "unseen-is-gone": ("a machine that Ray does not see is given up", (Fleet, "may_serve_on", _machine_gone_at_once)),
    "never-withdrawn": ("routers keep nodes that have ended", (Membership, "withdraw", _withdrawn_late)),
    "pauses-not-told": ("routers do not hear of a pause", (Membership, "pause", _pauses_not_told)),
    "no-door": ("a new router does not get the socket", (RouterSupervisor, "_open_door", _without_a_door)),
    "departure-unrecorded": ("what has left stays in the record", (Departures, "_until_kept", _departed_not_recorded)),
    "two-controllers": (
        "a controller that was replaced wakes up and records",
        (Turn, "_check", lambda right: lambda self, kept: None),
    ),
    "role-unrecorded": ("a change of role is not recorded", (Reconciler, "change_to", _role_not_recorded)),
}
