"""Decides the next step of a rollout: which router or node is replaced, or that the rollout is taken back. Pure: state and facts in, one step
out. It only takes old nodes away. A pool may have `plan.surge` nodes more than its size, which start with the new configuration."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from tandem.cluster.config import PoolsConfig, RolloutConfig, TandemConfig
from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.plan import RetireNode, SetRouter, new_router, retire_router, wanted_size
from tandem.cluster.pools.state import ClusterState, NodeRecord
from tandem.wire.nodes import Role

NO_MACHINE = (
    "no machine has what a node needs with the new configuration (pools.{0}.resources, pools.{0}.label_selector)"
)


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    known: Facts
    ready: Set[str]  # nodes and routers that serve; new ones only after `rollout.settle_s`
    idle: Set[str]  # nodes that serve nothing, so that they can be removed at no cost
    outdated_routers: Set[str]
    failed: Mapping[str, str]  # new nodes and routers that failed, and why
    longest_wait_s: float  # the longest wait of a request in a router's line that is acceptable
    coming: Set[str]  # places whose new routers have not served for `rollout.settle_s` yet; "" is the head


@dataclass(frozen=True, slots=True)
class GoBack:
    """The rollout is taken back: nodes and routers get the previous configuration again."""

    why: str


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """Everything that serves runs one configuration."""


@dataclass(frozen=True, slots=True)
class Wait:
    why: str


# Nodes that write answers come first: those that compute prompts for them, or encode images, are of no use to others.
_ROLLOUT_ORDER = sorted(Role, key=lambda role: (not role.writes_answers, not role.runs_requests))

_REPLACED = "drains and is replaced"

Step = RetireNode | SetRouter | GoBack | RolloutEnd | Wait


def next_step(rules: RolloutConfig, config: TandemConfig, state: ClusterState, facts: RolloutFacts) -> Step:
    """Returns the next step of the state's rollout. `config` is the one with which processes start now."""
    back = state.rollout is not None and bool(state.rollout.going_back)
    if not back and facts.failed:
        return GoBack("; ".join(f"{name}: {why}" for name, why in sorted(facts.failed.items())))
    # Routers come first: replacing one takes seconds, and a mistake in their settings shows before it costs a node.
    if (router_step := _of_routers(config, state, facts)) is not None:
        return router_step
    oldest_wait_s, waits = facts.known.longest_wait_s, list[str]()
    for role in _ROLLOUT_ORDER:
        step = _in_pool(rules, config.pools, state, facts, role)
        if isinstance(step, RetireNode):
            is_slow = oldest_wait_s > facts.longest_wait_s
            if back or not is_slow or step.node.node_id in facts.idle:
                return step
            waits.append(f"requests wait for {oldest_wait_s:.1f} s, longer than slo.ttft_s")
        elif step is not None:
            waits.append(step.why)
    if waits:
        return Wait("; ".join(dict.fromkeys(waits)))
    if going := [node.node_id for node in state.nodes if node.revision != state.revision.number]:
        return Wait(f"{', '.join(going)}: finishing their requests")
    # The old nodes may have gone for another reason, with their machines for example.
    writers = [node.node_id for node in state.nodes if node.role.writes_answers and not node.leaving]
    if state.rollout is not None and state.rollout.nodes and not back and facts.ready.isdisjoint(writers):
        return Wait("no new node that decodes has served yet")
    return RolloutEnd()


def _of_routers(config: TandemConfig, state: ClusterState, facts: RolloutFacts) -> SetRouter | Wait | None:
    """Replaces routers one by one. Old and new share a listening socket, so clients are served throughout."""
    for old in state.staying_routers:
        if old.name not in facts.outdated_routers:
            continue
        there = [router for router in state.staying_routers if router.place == old.place]
        new = [router.name for router in there if router.name not in facts.outdated_routers]
        late = [name for name in new if name not in facts.ready]
        if late:
            return Wait(f"{', '.join(late)}: not served for long enough yet")
        # A place gets its first new router before it loses an old one, whatever `router.processes` is.
        if len(there) > config.router.processes and new:
            return retire_router(old, _REPLACED)
        added = new_router(config, state, facts.known, old.place)
        return added or Wait(f"{old.name}: another router cannot start in its place yet")
    if facts.coming:
        where = ", ".join(place or "the head" for place in sorted(facts.coming))
        return Wait(f"the routers of {where}: not served for long enough yet")
    return None


def _in_pool(
    config: RolloutConfig, pools: PoolsConfig, state: ClusterState, facts: RolloutFacts, role: Role
) -> RetireNode | Wait | None:
    hosts = facts.known.hosts
    wanted = wanted_size(state, hosts, role, pools)
    staying, outdated = state.staying(role), state.outdated(role)
    if not outdated:
        # Nodes without a machine, or left out, are so for other reasons than the rollout.
        coming = [node for node in staying if node.placement is not None and not node.left_out]
        missing = [node.node_id for node in coming if node.node_id not in facts.ready]
        return Wait(f"{', '.join(missing)}: not ready yet") if missing else None
    idle = [node for node in outdated if node.node_id in facts.idle]
    if idle:
        return _replace(idle[-1])
    able = {host.name for host in hosts if host.could_have(role)}
    if not able and state.rollout is not None and not state.rollout.going_back:
        # Wait until one comes: an old node would be removed without a replacement.
        return Wait(f"{role.value}: {NO_MACHINE.format(role.value)}")
    serving = [node for node in outdated if node.node_id in facts.ready]
    # First the nodes on machines that a new node can use.
    serving.sort(key=lambda node: node.placement is None or node.placement.host not in able)
    if not serving:
        return Wait(f"{', '.join(node.node_id for node in outdated)}: not seen since the controller's start")
    least = wanted - most_unavailable(config, state, wanted, role)
    ready = sum(node.node_id in facts.ready for node in staying)
    if ready - 1 < least:
        waiting = [n.node_id for n in staying if n.placement is None]
        if waiting:
            return Wait(
                f"{', '.join(waiting)}: no machine has room, and fewer than {least} {role.value} nodes may not serve "
                "(rollout.max_unavailable)"
            )
        return Wait(f"{role.value}: an old node can go when {least + 1} are ready, and {ready} are")
    if not role.writes_answers and role.hands_over and _waits_for_writers(state, facts):
        return Wait(f"{role.value}: waits until a new node that decodes is ready")
    return _replace(serving[0])


def _replace(node: NodeRecord) -> RetireNode:
    return RetireNode(node, f"{node.node_id} {_REPLACED}")


def _waits_for_writers(state: ClusterState, facts: RolloutFacts) -> bool:
    """A prefill node with a new content is useless until a node with that content decodes."""
    writers = [node for node in state.nodes if node.role.writes_answers and not node.leaving]
    new = [node for node in writers if node.revision == state.revision.number]
    return len(new) < len(writers) and not any(node.node_id in facts.ready for node in new)


def most_unavailable(config: RolloutConfig, state: ClusterState, wanted: int, role: Role) -> int:
    if config.max_unavailable is not None:
        return config.max_unavailable
    # Without prefill nodes, decode nodes compute prompts; without encoder nodes, the nodes that compute prompts encode images.
    can_do_without = wanted > 1 or not role.writes_answers
    is_full = (
        state.sizes.get(role, 0) is None
        or config.surge == 0
        or any(node.placement is None for node in state.staying(role))
    )
    return int(can_do_without and is_full)
