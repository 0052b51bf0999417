"""`cluster.hosts.Hosts` where everything runs on this machine."""

from __future__ import annotations

import asyncio

from tandem.cluster.hosts import Host
from tandem.cluster.pools.placement import LocalMachine, this_host
from tandem.wire.nodes import Role


class ThisMachine:
    """It has room for everything that fits, and stays."""

    def __init__(self, machine: LocalMachine, address: str) -> None:
        self._host = this_host(machine, address)

    async def present(self) -> list[Host]:
        return [self._host]

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def want(self, slots: dict[Role, int]) -> None:
        """Nobody can add machines here."""
