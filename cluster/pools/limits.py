"""Checks what operators order of pools. Pure. Every check raises ConfigurationError with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import PoolsConfig, TandemConfig
from tandem.cluster.describe import counted
from tandem.cluster.launcher import Host
from tandem.cluster.pools.plan import wanted_size
from tandem.cluster.pools.room import too_many_for_cores
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.roles import traits_of
from tandem.engine.config import OWN_ENGINE
from tandem.wire.nodes import Role


def check_limits(config: TandemConfig, role: Role, size: int | None) -> None:
    pool = config.pools.of(role)
    if size is not None and size < pool.min:
        raise ConfigurationError(
            f"pools.{role.value}.min is {pool.min}: the pool cannot have {counted(size, 'node')}"
        )
    if size is not None and pool.max is not None and size > pool.max:
        raise ConfigurationError(
            f"pools.{role.value}.max is {pool.max}: the pool cannot have {counted(size, 'node')}"
        )


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


def check_room(
    pools: PoolsConfig, current: ClusterState, wanted: ClusterState, machines: Sequence[Host]
) -> None:
    """Checks machines that offer no places, so that nothing else limits how many nodes they take."""
    sizes = {role: wanted_size(wanted, machines, role, pools) for role in Role}
    if sum(sizes.values()) <= sum(wanted_size(current, machines, role, pools) for role in Role):
        return
    for host in machines:
        if host.slots is None:
            reason = too_many_for_cores(sizes, len(host.cores), pools.nodes_per_core)
            if reason is not None:
                raise ConfigurationError(f"{reason}: scale to fewer")
