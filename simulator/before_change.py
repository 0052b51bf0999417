"""What other sizes are expected to bring, for commands that change them: the requests of all routers' last minutes are played on the cluster
as it is and on the other, with what its nodes have learnt, within a few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.api_client import ApiClient, key_from_environment
from tandem.cluster.config import TandemConfig
from tandem.engine.config import OWN_ENGINE
from tandem.router.page_state import PageState
from tandem.router.recent import LATEST, WINDOW_S, RequestAccount
from tandem.simulator.change import change_of
from tandem.simulator.learnt import learnt_costs
from tandem.wire.forecasts import Forecast
from tandem.wire.nodes import ENGINE_ROLES, Role

SIMULATING_S = 4.0
ANSWER_S = 2.0  # until a router has answered
ASKED_AT_ONCE = 16


class TooSlow(Exception):
    """The simulation takes longer than an operator waits."""


def foretell(urls: Sequence[str], wanted: Mapping[Role, int], config: TandemConfig) -> Forecast:
    """`urls`: of all routers. Raises a TandemError with the reason if it cannot be said."""
    if not {*wanted} <= {*ENGINE_ROLES}:
        raise ConfigurationError("encoder nodes are not simulated")
    if config.model.engine != OWN_ENGINE:
        raise ConfigurationError(f"the nodes compute with {config.model.engine}, whose steps are not simulated")
    with ThreadPoolExecutor(min(len(urls), ASKED_AT_ONCE)) as asking:
        pages = list(asking.map(_page, urls))
    for pool in pages[0].pools:
        if pool.ready != pool.wanted:
            raise ConfigurationError(f"{pool.ready} of {pool.wanted} {pool.role} nodes serve now")
    costs = learnt_costs(urls[0], timeout=ANSWER_S).costs
    since = max(page.nodes_since for page in pages)
    state = msgspec.structs.replace(pages[0], latest=together(pages), nodes_since=since)
    give_up_at = time.monotonic() + SIMULATING_S

    def in_time(share: float, seconds: float, running: int) -> None:
        if time.monotonic() > give_up_at:
            raise TooSlow

    try:
        return change_of(state, wanted, config, costs, in_time)
    except Exception as error:
        if not _is_slow(error):
            raise
        raise ConfigurationError(
            f"simulating {len(state.latest)} requests twice takes more than {SIMULATING_S:.0f} s here: `tandem what-if` takes its time"
        ) from None


def _page(url: str) -> PageState:
    with closing(ApiClient(url, key_from_environment(), timeout=ANSWER_S)) as client:
        return client.read("/ui/state", PageState)


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
