"""What one simulation plays, and on which cluster."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.cluster.wings import NodeCores
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow
from tandem.simulator.costs import CostModel
from tandem.simulator.traffic import PlayedTraffic
from tandem.wire.nodes import Role


class SimulationSetup(msgspec.Struct, frozen=True):
    config: TandemConfig
    costs: Mapping[Role, CostModel]
    traffic: PlayedTraffic
    slo: ServiceLevel | None = None
    machines: int | None = None  # that all pools share, with a node on each; None: always enough for the wanted nodes
    by_steps: bool = False  # simulate every step alone, and never a run of steps at once
    one_machine: bool = False  # all nodes are on the same one, and slow each other
    cores: NodeCores = {}  # of the first nodes of each role; others have their own
    # What a line of an endless batch asks for: as many as are idle run beside the traffic. None: there is no batch.
    line: TraceRow | None = None
    counted_from: float = 0.0  # what the nodes compute before is not in their share of busy time
    # Give the run up when it is certain that a smaller share of the requests than this will keep the service level.
    give_up_below: float = 0.0

    def check(self) -> None:
        if not self.config.pools.total:
            raise ConfigurationError("there must be at least 1 node: --prefill N and --decode N, or --aggregated N")
        if not self.config.pools.decode.first_size and not self.config.pools.aggregated.first_size:
            raise ConfigurationError("without a decode node or an aggregated one no answer is written: --decode N")
        if self.machines is not None and self.machines < self.config.pools.total:
            raise ConfigurationError(
                f"--machines must be at least {self.config.pools.total}, the nodes at the beginning, not {self.machines}"
            )
        if self.one_machine and self.machines is not None:
            raise ConfigurationError(
                "--machines gives each node a machine, and --one-machine one to all: give one of them"
            )
        for role in Role:
            if self.config.pools.of(role).last_size and role not in self.costs:
                raise ConfigurationError(f"there are no costs for {role.value} nodes")
            costs = self.costs.get(role)
            size = self.config.engine_of(role).cache.block_size
            if costs is not None and costs.blocks * costs.block_size // size < 2:
                raise ConfigurationError(f"{costs.name} has no room for two blocks of {size} tokens")
