"""What other sizes are expected to bring, for a controller: the requests of all routers' last minutes are played on the cluster as it is and on
the other, with what its nodes have learnt, within a few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.cluster.wings import NodeCores
from tandem.engine.config import OWN_ENGINE
from tandem.router.page_state import PageState
from tandem.router.recent import LATEST, WINDOW_S, RequestAccount
from tandem.simulator.change import change_of
from tandem.simulator.learnt import LearntNode, costs_of_nodes
from tandem.simulator.planner import PoolSizes
from tandem.wire.forecasts import Forecast
from tandem.wire.nodes import Role

SIMULATING_S = 8.0


class TooSlow(Exception):
    """The simulation takes longer than an operator waits."""


class RouterRecall(msgspec.Struct):
    """What a router remembers of its last requests, and what it was told of the nodes."""

    page: PageState
    nodes: list[LearntNode]


def foretell(
    told: Sequence[bytes],
    there: Mapping[Role, int],
    wanted: Mapping[Role, int],
    config: TandemConfig,
    cores: tuple[NodeCores, NodeCores] = ({}, {}),
) -> Forecast:
    """See `cluster.wings.ForesightWing`."""
    if config.model.engine != OWN_ENGINE:
        raise ConfigurationError(f"the nodes compute with {config.model.engine}, whose steps are not simulated")
    routers = [msgspec.json.decode(each, type=RouterRecall) for each in told]
    pages = [each.page for each in routers]
    costs = costs_of_nodes("the cluster", routers[0].nodes, pages[0]).costs
    since = max(page.nodes_since for page in pages)
    state = msgspec.structs.replace(pages[0], latest=together(pages), nodes_since=since)
    now = PoolSizes(there.get(Role.PREFILL, 0), there.get(Role.DECODE, 0), there.get(Role.AGGREGATED, 0))
    give_up_at = time.monotonic() + SIMULATING_S

    def in_time(share: float, seconds: float, running: int) -> None:
        if time.monotonic() > give_up_at:
            raise TooSlow

    try:
        return change_of(state, wanted, config, costs, in_time, now, cores)
    except Exception as error:
        if not _is_slow(error):
            raise
        raise ConfigurationError(
            f"simulating {len(state.latest)} requests twice takes more than {SIMULATING_S:.0f} s here: `tandem what-if` takes its time"
        ) from None


def together(pages: Iterable[PageState]) -> list[RequestAccount]:
    """Returns the requests of the last minutes in which every router remembers all of its own."""
    all_of: list[RequestAccount] = []
    since = 0.0
    for page in pages:
        all_of += page.latest
        ended = [account.ended_at for account in page.latest]
        # One that remembers as many as it can has forgotten those before.
        since = max(since, page.now - WINDOW_S, min(ended) if len(ended) >= LATEST else 0.0)
    return [account for account in all_of if account.ended_at >= since]


def _is_slow(error: BaseException) -> bool:
    """Whether the simulation was given up: its tasks end together, in groups."""
    return any(map(_is_slow, error.exceptions)) if isinstance(error, BaseExceptionGroup) else isinstance(error, TooSlow)
