"""What other sizes of the pools would do to a serving cluster: its router's last requests are played on it as it is, and on the other.

The answer begins from what was measured: a figure changes by as much as the simulation's does. Its interval, for as many requests to come as a
forecast is graded by, has two parts. One is how far the figure moves when other requests like these come, by drawing from them again and again. The
other is how far the simulation of the cluster as it is lies from what was measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import hypot, isqrt, sqrt

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.percentile import percentile
from tandem.cluster.config import TandemConfig
from tandem.cluster.wings import NodeCores
from tandem.router.page_state import PageState
from tandem.router.recent import RequestAccount
from tandem.simulator.costs import CostModel
from tandem.simulator.outcome import SimulationReport
from tandem.simulator.planner import PoolSizes
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.simulation import OnProgress, simulate
from tandem.simulator.what_if import as_traffic, sizes_of
from tandem.wire.forecasts import FEWEST_REQUESTS, FIGURES, GRADED_REQUESTS, ExpectedFigure, Forecast
from tandem.wire.nodes import ENGINE_ROLES, Role

DRAWS = 200
TIMES = ("first_token_s", "token_s")
INSIDE = 80.0  # percent of the draws that lie in the interval


class _Times(msgspec.Struct, frozen=True):
    """TIMES of one request: measured, and simulated in both clusters."""

    measured: tuple[float, float]
    now: tuple[float, float]
    then: tuple[float, float]


def change_of(
    state: PageState,
    wanted: Mapping[Role, int],
    config: TandemConfig,
    costs: Mapping[Role, CostModel],
    on_progress: OnProgress | None = None,
    there: PoolSizes | None = None,
    cores: tuple[NodeCores, NodeCores] = ({}, {}),
) -> Forecast:
    """`there`: the sizes now; by default the nodes that serve. `cores`: of the nodes, now and then. Raises ConfigurationError with the
    reason if it cannot be said."""
    other = there = there or sizes_of(state)
    for role, size in wanted.items():
        other = other.with_size(role, size)
    if not other.decode and not other.aggregated:
        raise ConfigurationError("no node would be left to decode: keep at least 1 decode or aggregated node")
    whole = (one for one in state.latest if one.is_whole and one.began_at >= state.nodes_since)
    accounts = sorted(whole, key=lambda account: account.began_at)
    if len(accounts) < FEWEST_REQUESTS:
        raise ConfigurationError(
            f"{len(accounts)} requests are known that began with the nodes that serve now and were answered, and {FEWEST_REQUESTS} are the fewest to say something from"
        )
    traffic, warm = as_traffic(accounts, config.cache.block_size, next(iter(costs.values())))

    def play(sizes: PoolSizes, on: NodeCores) -> tuple[SimulationReport, dict[int, tuple[float, float]]]:
        answers: dict[int, tuple[float, float]] = {}
        setup = SimulationSetup(
            msgspec.structs.replace(config, pools=sizes.pools(config.pools)),
            costs,
            traffic,
            cores=on,
            counted_from=traffic.rows[warm].arrival_s,
        )
        report = simulate(setup, on_progress, lambda index, *times: answers.update({index - warm: times}))
        return report, answers

    report_now, now = play(there, cores[0])
    report_then, then = play(other, cores[1])
    played = [
        _times(account, now[index], then[index])
        for index, account in enumerate(accounts)
        if index in now and index in then
    ]
    if len(played) < FEWEST_REQUESTS:
        raise ConfigurationError(
            f"the simulated clusters serve {len(played)} of {len(accounts)} requests: are --costs and the settings those of this cluster?"
        )
    return Forecast(
        now=str(there),
        then=str(other),
        requests=len(played),
        seconds=max(account.ended_at for account in accounts) - accounts[0].began_at,
        expected=[_expected(what, played, TIMES.index(field), percent) for what, (field, percent) in FIGURES.items()],
        busy_now=_busy(report_now),
        busy_then=_busy(report_then),
        sizes={role: other.of(role) for role in ENGINE_ROLES},
        longest_s=max(account.total_s for account in accounts),
    )


def _times(account: RequestAccount, now: tuple[float, float], then: tuple[float, float]) -> _Times:
    gaps = max(account.output_tokens - 1, 1)
    return _Times(
        (account.first_token_s, account.token_s),
        (now[0], (now[1] - now[0]) / gaps),
        (then[0], (then[1] - then[0]) / gaps),
    )


def _expected(what: str, played: Sequence[_Times], part: int, percent: float) -> ExpectedFigure:
    def figures(of: Sequence[_Times]) -> tuple[float, float, float]:
        measured, now, then = (
            percentile(sorted(getattr(one, name)[part] for one in of), percent) for name in ("measured", "now", "then")
        )
        return measured, now, measured * then / now if now > 0 else measured

    measured, now, then = figures(played)
    rng, count = random.Random(len(played)), len(played)
    # Drawn in runs, because requests that come one after another wait for each other.
    length = isqrt(count)
    drawn = sorted(
        figures(
            [one for at in rng.choices(range(count - length + 1), k=length + 1) for one in played[at : at + length]]
        )[2]
        for _ in range(DRAWS)
    )
    error = abs(now / measured - 1) * then if measured > 0 else 0.0
    # Both the requests that were and those that will be are drawn.
    both = sqrt(1 + count / GRADED_REQUESTS)
    below, above = (both * (percentile(drawn, 50 + side * INSIDE / 2) - then) for side in (-1, 1))
    low, high = then - hypot(min(below, 0.0), error), then + hypot(max(above, 0.0), error)
    return ExpectedFigure(what, measured, now, then, max(low, 0.0), high)


def _busy(report: SimulationReport) -> dict[str, float]:
    of_roles = {role.value: [load.busy for load in report.nodes if load.role == role.value] for role in ENGINE_ROLES}
    return {role: sum(busy) / len(busy) for role, busy in of_roles.items() if busy}
