"""What operators order, as the state that is to be recorded. Pure: configuration, state and facts in, the new state out, or an error of
`base.errors` that says why not. `Reconciler.change_to` records it and carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.config import PoolsConfig, TandemConfig
from tandem.cluster.control import AppliedChange
from tandem.cluster.describe import counted
from tandem.cluster.launcher import Host
from tandem.cluster.pools.changes import ConfigDifference
from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.plan import wanted_size
from tandem.cluster.pools.room import too_many_for_cores
from tandem.cluster.pools.state import ClusterState, NodeRecord
from tandem.cluster.roles import traits_of
from tandem.engine.config import OWN_ENGINE
from tandem.wire.nodes import Role


def check_limits(config: TandemConfig, role: Role, size: int | None) -> None:
    pool = config.pools.of(role)
    if size is not None and size < pool.min:
        raise ConfigurationError(f"pools.{role.value}.min is {pool.min}: the pool cannot have {counted(size, 'node')}")
    if size is not None and pool.max is not None and size > pool.max:
        raise ConfigurationError(f"pools.{role.value}.max is {pool.max}: the pool cannot have {counted(size, 'node')}")


def check_alike(pools: PoolsConfig, before: Role, after: Role) -> None:
    """Checks that a node can change between these roles: its process keeps its environment, model and KV cache."""
    if why := traits_of(before).fixed or traits_of(after).fixed:
        raise ConfigurationError(f"{why}: scale {before.value} down and {after.value} up")
    for name, what in (
        ("env", "a process keeps the environment that it started with"),
        ("cache", "a node keeps the blocks that it started with"),
        ("scheduler", "a node keeps room for the steps that it started with"),
        ("tensor_parallel", "a node keeps the ranks that it started with"),
        ("pipeline_parallel", "a node keeps the stages that it started with"),
        ("context_parallel", "a node keeps the ranks that it started with"),
    ):
        if getattr(pools.of(before), name) != getattr(pools.of(after), name):
            raise ConfigurationError(
                f"pools.{before.value}.{name} and pools.{after.value}.{name} differ, and {what}: scale {before.value} down and "
                f"{after.value} up, or make the two the same with `tandem apply`"
            )
    if (ranks := pools.of(before).ranks) > 1:
        raise ConfigurationError(
            f"a node of {ranks} ranks cannot change its role: scale {before.value} down and {after.value} up"
        )


def check_engine_lets_go(config: TandemConfig, before: Role, after: Role) -> None:
    if config.model.engine != OWN_ENGINE:
        raise ConfigurationError(
            f"a node whose engine is {config.model.engine} keeps its role: scale {before.value} down and {after.value} up"
        )


def check_writers(wanted: ClusterState) -> None:
    sizes = (wanted.sizes[role] for role in Role if role.writes_answers)
    if sum(1 if size is None else size for size in sizes) < 1:
        raise ConfigurationError("no node would be left to decode: keep at least 1 decode or aggregated node")


def check_room(pools: PoolsConfig, current: ClusterState, wanted: ClusterState, machines: Sequence[Host]) -> None:
    """Checks machines that offer no places, so that nothing else limits how many nodes they take."""
    sizes = {role: wanted_size(wanted, machines, role, pools) for role in Role}
    if sum(sizes.values()) <= sum(wanted_size(current, machines, role, pools) for role in Role):
        return
    for host in machines:
        if host.slots is None:
            reason = too_many_for_cores(sizes, len(host.cores), pools.nodes_per_core)
            if reason is not None:
                raise ConfigurationError(f"{reason}: scale to fewer")


_POOLS = tuple(role.value for role in Role)

# --- sizes


def scaled(
    config: TandemConfig, state: ClusterState, facts: Facts, sizes: Mapping[Role, int]
) -> tuple[ClusterState, list[str]]:
    """Returns also what will be done, a line for each pool."""
    for role, size in sizes.items():
        check_limits(config, role, size)
    lines = [describe_size(state, role, size) for role, size in sizes.items()]
    return resized(config, state, facts, sizes), lines


def resized(config: TandemConfig, state: ClusterState, facts: Facts, sizes: Mapping[Role, int | None]) -> ClusterState:
    new = state.with_sizes(sizes)
    check_writers(new)
    check_room(config.pools, state, new, facts.hosts)
    return new


def describe_size(state: ClusterState, role: Role, size: int) -> str:
    current = len(state.staying(role))
    if size > current:
        return f"{role.value}: from {current} to {size}, {counted(size - current, 'node')} more"
    if size < current:
        return f"{role.value}: from {current} to {size}, {counted(current - size, 'node')} drained"
    return f"{role.value}: stays at {size}"


# --- nodes that leave, or change


def drained(config: TandemConfig, state: ClusterState, facts: Facts, record: NodeRecord) -> ClusterState:
    _check_may_go(config, state, facts, record)
    return state.releasing(record)


def evacuated(state: ClusterState, facts: Facts, address: str) -> tuple[ClusterState, list[str]]:
    """Returns also the names of the nodes there."""
    names = {host.name for host in facts.hosts if host.address == address}
    if not names:
        there = ", ".join(host.address for host in facts.hosts) or "none"
        raise ConfigurationError(f"there is no machine {address}; there are: {there}")
    new = state.evacuating(names, [host.name for host in facts.hosts])
    return new, [node.node_id for node in new.nodes if node.is_on(names)]


def with_role(config: TandemConfig, state: ClusterState, facts: Facts, record: NodeRecord, role: Role) -> ClusterState:
    if state.rollout is not None:
        raise Unavailable("a rollout is replacing nodes: change the role when it is over (`tandem status`)")
    node = facts.nodes.get(record.node_id)
    if record.leaving or node is None or not facts.is_ready(record.node_id):
        phase = "waiting for a machine" if node is None else node.phase.value
        raise Unavailable(f"{record.node_id} is {phase}: only a ready node can change its role")
    _check_may_go(config, state, facts, record)
    check_limits(config, role, wanted_size(state, facts.hosts, role, config.pools) + 1)
    check_engine_lets_go(config, record.role, role)
    check_alike(config.pools, record.role, role)
    new = state.with_node(msgspec.structs.replace(record, role=role))
    return new.resized(record.role, -1).resized(role, +1)


def _check_may_go(config: TandemConfig, state: ClusterState, facts: Facts, record: NodeRecord) -> None:
    """Raises ConfigurationError if the pool, or the deployment, cannot do without this node."""
    role, size = record.role, wanted_size(state, facts.hosts, record.role, config.pools)
    check_limits(config, role, size - 1)
    if not role.writes_answers:
        return
    others = [
        node
        for node in state.nodes
        if node.role.writes_answers and node.node_id != record.node_id and facts.is_ready(node.node_id)
    ]
    if not others:
        raise ConfigurationError(
            f"{record.node_id} is the last node that can decode: run `tandem scale {role.value}={size + 1}` first"
        )
    if state.rollout is not None and all(node.revision != record.revision for node in others):
        raise Unavailable(
            f"a rollout is running, and {record.node_id} is the last node with its configuration that can decode: drain it when it is "
            "over (`tandem status`)"
        )
    check_writers(state.resized(role, -1))  # a rollout takes the others away


# --- another configuration


def with_config(
    running: TandemConfig,
    state: ClusterState,
    facts: Facts,
    wanted: TandemConfig,
    found: ConfigDifference,
    unix_time: float,
) -> ClusterState:
    """`found`: how `wanted` differs from `running`. Nodes and routers that read a changed setting at their start are to be replaced one by
    one."""
    if state.rollout is not None:
        raise Unavailable(
            "a rollout is running: wait for its end (`tandem status`), or take it back with `tandem apply --back`"
        )
    for role, size in found.sizes.items():
        check_limits(wanted, role, size)
    sized, revision = resized(running, state, facts, found.sizes), state.revision
    nodes, routers = bool(found.nodes), bool(found.routers)
    if not nodes and not routers:
        return msgspec.structs.replace(sized, revision=msgspec.structs.replace(revision, config=wanted))
    commit = "" if nodes and wanted.model != running.model else revision.commit
    adapters = revision.adapters if wanted.model.adapters == running.model.adapters else None
    return sized.beginning(wanted, commit, unix_time, adapters, nodes=nodes, routers=routers)


def describe_difference(state: ClusterState, found: ConfigDifference) -> AppliedChange:
    sizes = [
        f"{role.value}: a node for each place" if size is None else describe_size(state, role, size)
        for role, size in found.sizes.items()
    ]
    going = [node.node_id for node in state.nodes if not node.leaving] if found.nodes else []
    if found.routers:
        going += [router.name for router in state.staying_routers]
    return AppliedChange(
        [*sizes, *found.at_once],
        found.nodes,
        found.refused,
        going,
        state.revision.number,
        found.routers,
        found.controller,
        sizes={role: size for role, size in found.sizes.items() if size is not None and size != state.sizes.get(role)},
    )


# --- pauses


def paused(state: ClusterState, names: Sequence[str]) -> ClusterState:
    check_names(state, names)
    return _with_paused(state, {*state.paused, *(names or _POOLS)})


def resumed(state: ClusterState, names: Sequence[str]) -> ClusterState:
    check_names(state, names)
    before = {*state.paused}
    for name in names:
        record = state.find(name)
        if record is not None and record.role.value in before - {*names}:
            raise ConfigurationError(f"{name} is paused with its pool: resume {record.role.value}")
    return _with_paused(state, before - {*names} if names else set())


def _with_paused(state: ClusterState, names: set[str]) -> ClusterState:
    return msgspec.structs.replace(state, paused=sorted(names))


def check_names(state: ClusterState, names: Sequence[str]) -> None:
    """Raises ConfigurationError for a name of neither a pool nor a node."""
    for name in names:
        if name not in _POOLS:
            state.known(name)
