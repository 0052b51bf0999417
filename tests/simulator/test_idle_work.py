"""A batch beside users' traffic: it takes what is idle, and users feel next to nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from tandem.loadgen.traces import TraceRow
from tandem.simulator.costs import read_costs
from tandem.simulator.outcome import SimulationReport
from tandem.simulator.simulation import simulate
from tests.simulator.worlds import a_setup

EXAMPLE = Path(__file__).parents[2] / "simulator" / "example.json"


def busy(report: SimulationReport) -> float:
    return sum(load.busy * load.seconds for load in report.nodes) / sum(load.seconds for load in report.nodes)


def test_a_batch_fills_what_is_idle_and_users_do_not_feel_it() -> None:
    """SmolLM2 on cores of a Xeon, two nodes of each role, 16 requests of up to 900 tokens in about 90 s."""
    draw = np.random.default_rng(3)
    arrivals = np.cumsum(draw.exponential(6.0, size=16))
    rows = [TraceRow(float(at), int(draw.integers(50, 900)), int(draw.integers(5, 60))) for at in arrivals]
    alone = a_setup(rows, prefill=2, decode=2, costs=read_costs(EXAMPLE))
    before = simulate(alone)
    beside = simulate(msgspec.structs.replace(alone, line=TraceRow(0.0, 400, 100)))
    assert (beside.served, beside.refused, beside.failed) == (16, 0, 0)
    assert beside.lines > 50
    assert (busy(beside) - busy(before)) / (1 - busy(before)) > 0.9
    assert beside.ttft_ms.p99 < 1.05 * before.ttft_ms.p99
    assert beside.itl_ms.p99 < 1.05 * before.itl_ms.p99
