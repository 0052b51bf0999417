"""Small costs and clusters for the simulator's tests. Seconds are multiples of a power of two, so that sums of them are exact."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.wings import NodeCores
from tandem.engine.config import CacheConfig, SchedulerConfig
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow
from tandem.simulator.costs import CostModel, CostTable, RequestCost, TransferCost
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.traffic import PlayedTraffic
from tandem.wire.nodes import Role

TICK = 2.0**-20


def ticks(*counts: float) -> list[float]:
    return [count * TICK for count in counts]


def node_costs(
    *,
    blocks: int = 400,
    max_model_len: int = 4096,
    start_s: float = 8.0,
    prefill_ticks: float = 8192,
    decode_ticks: float = 8192,
    per_context: float = 1,
    per_request: float = 64,
) -> CostModel:
    """Costs of about 8 ms for a decode step; a prompt of 1,024 tokens takes nine times as long."""
    last = 1025
    prefill = CostTable(
        [1.0, float(last)],
        [0.0, 1024.0],
        [ticks(prefill_ticks, prefill_ticks + 1024), ticks(9 * prefill_ticks, 10 * prefill_ticks)],
    )
    decode = CostTable(
        [1.0, 65.0],
        [0.0, 512.0, 1024.0],
        [
            ticks(
                decode_ticks + extra,
                decode_ticks + extra + 512 * per_context,
                decode_ticks + extra + 2048 * per_context,
            )
            for extra in (0, 64 * per_request)
        ],
    )
    return CostModel(
        "test", max_model_len, blocks, 16, 1024.0, prefill, decode, TransferCost(2048 * TICK, 2.0**30),
        RequestCost(1024 * TICK, 0.0, 512 * TICK), start_s=start_s,
    )  # fmt: skip


def a_setup(
    rows: Sequence[TraceRow],
    *,
    prefill: PoolConfig | int = 1,
    decode: PoolConfig | int = 1,
    aggregated: int = 0,
    costs: CostModel | None = None,
    slo: ServiceLevel | None = None,
    by_steps: bool = False,
    one_machine: bool = False,
    cores: NodeCores | None = None,
    **scheduler: object,
) -> SimulationSetup:
    def pool(size: PoolConfig | int) -> PoolConfig:
        return size if isinstance(size, PoolConfig) else PoolConfig(nodes=size)

    config = TandemConfig(
        pools=PoolsConfig(prefill=pool(prefill), decode=pool(decode), aggregated=pool(aggregated)),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
    )
    costs = costs or node_costs()
    return SimulationSetup(
        config,
        dict.fromkeys(Role, costs),
        PlayedTraffic(rows, 16),
        slo,
        by_steps=by_steps,
        one_machine=one_machine,
        cores=cores or {},
    )


def apart(text: Sequence[tuple[float, int, int]]) -> list[TraceRow]:
    """Requests by (time, prompt tokens, answer tokens) that share no text."""
    return [TraceRow(at, prompt, answer) for at, prompt, answer in text]
