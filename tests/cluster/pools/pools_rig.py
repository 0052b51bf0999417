"""Builds pools and machines for tests of the controller."""

from __future__ import annotations

import pytest

from tandem.base.wings import is_there
from tandem.cluster.config import PoolConfig, PoolsConfig
from tandem.cluster.launcher import Host
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import TIMEOUTS, Rig

PD = (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE))
DRAIN_S = TIMEOUTS.nodes.drain_s
needs_rollouts = pytest.mark.skipif(not is_there("tandem.cluster.pools.rollouts"), reason="rollouts are not here")


def machine(name: str, *, prefill: int = 0, decode: int = 0, cores: int = 4) -> Host:
    slots = {Role.PREFILL: prefill, Role.DECODE: decode}
    return Host(name, f"10.0.0.{name}", tuple(range(cores)), slots={role: n for role, n in slots.items() if n})


def pools(prefill: PoolConfig | int | None, decode: PoolConfig | int | None) -> PoolsConfig:
    def pool(given: PoolConfig | int | None) -> PoolConfig:
        return given if isinstance(given, PoolConfig) else PoolConfig(nodes=given)

    return PoolsConfig(prefill=pool(prefill), decode=pool(decode))


async def phases(rig: Rig) -> dict[str, str]:
    return {node.node_id: node.phase for node in (await rig.controller.view()).nodes}


async def pool_of(rig: Rig, role: Role):
    (pool,) = [pool for pool in (await rig.controller.view()).pools if pool.role is role]
    return pool
