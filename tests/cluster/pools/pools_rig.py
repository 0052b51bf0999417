"""Builds pools and machines for tests of the controller."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from tandem.base.wings import is_there
from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.launcher import Host
from tandem.router.config import RouterConfig, RouterPlacement
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, FakeHosts, Rig

replace = msgspec.structs.replace
PD = (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE))
PPD = (*PD, ("prefill-1", Role.PREFILL))
PDD = (*PD, ("decode-1", Role.DECODE))
EVERY_HOST = TandemConfig(router=RouterConfig("model", "fake", placement=RouterPlacement.EVERY_HOST))
DRAIN_S = TIMEOUTS.nodes.drain_s
needs_rollouts = pytest.mark.skipif(not is_there("tandem.cluster.pools.rollouts"), reason="rollouts are not here")


def machine(name: str, *, prefill: int = 0, decode: int = 0, cores: int = 4) -> Host:
    slots = {Role.PREFILL: prefill, Role.DECODE: decode}
    return Host(name, f"10.0.0.{name}", tuple(range(cores)), slots={role: n for role, n in slots.items() if n})


def pools(prefill: PoolConfig | int | None, decode: PoolConfig | int | None) -> PoolsConfig:
    def pool(given: PoolConfig | int | None) -> PoolConfig:
        return given if isinstance(given, PoolConfig) else PoolConfig(nodes=given)

    return PoolsConfig(prefill=pool(prefill), decode=pool(decode))


def machines(*places: str) -> FakeHosts:
    """Machines 1, 2 and so on: "pdd" has a place for a prefill node and two for decode nodes."""
    return FakeHosts(
        *(machine(str(n), prefill=each.count("p"), decode=each.count("d")) for n, each in enumerate(places, 1))
    )


def with_seqs(config: TandemConfig, seqs: int = 77) -> TandemConfig:
    """A change that needs new nodes."""
    return replace(config, scheduler=replace(config.scheduler, max_num_seqs=seqs))


def seqs_of(rig: Rig) -> Counter[int]:
    """How many nodes run with each such setting."""
    return Counter(node.config.engine.scheduler.max_num_seqs for node in rig.launcher.running)


async def phases(rig: Rig) -> dict[str, str]:
    return {node.node_id: node.phase for node in (await rig.controller.view()).nodes}


async def pool_of(rig: Rig, role: Role):
    (pool,) = [pool for pool in (await rig.controller.view()).pools if pool.role is role]
    return pool
