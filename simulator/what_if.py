"""Simulates how other clusters would have served one request, for `tandem why`.

It plays the requests that the router remembers again, first in a cluster of the same size, then in others. The difference between the
first simulation and the measured times is reported as the error of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec
from rich.console import Console

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.cluster.trace.why import Explanation, OtherCluster, OtherClusters
from tandem.loadgen.traces import TraceRow
from tandem.router.page_state import PageState
from tandem.router.recent import LATEST, RequestAccount
from tandem.simulator.costs import CostModel
from tandem.simulator.planner import PoolSizes
from tandem.simulator.setup import SimulationSetup
from tandem.simulator.show import progress
from tandem.simulator.simulation import OnProgress, simulate
from tandem.simulator.traffic import PlayedTraffic
from tandem.wire.nodes import ENGINE_ROLES, Role

# Seconds between two of the requests that fill the caches before the traffic begins.
_WARM_GAP_S = 0.5


def compared(
    why: Explanation, state: PageState, config: TandemConfig, costs: Mapping[Role, CostModel], console: Console
) -> Explanation:
    """Returns the explanation with other clusters added, or with a remark why they could not be simulated."""
    try:
        with progress(console, "simulating") as on_progress:
            others = other_clusters(state, why.request_id, config, costs, on_progress)
    except ConfigurationError as error:
        return msgspec.structs.replace(why, remarks=[*why.remarks, f"not compared with other clusters: {error}"])
    return msgspec.structs.replace(why, would_have_been=others)


def other_clusters(
    state: PageState,
    request_id: str,
    config: TandemConfig,
    costs: Mapping[Role, CostModel],
    on_progress: OnProgress | None = None,
) -> OtherClusters:
    """Raises ConfigurationError with the reason if the request cannot be compared."""
    there = sizes_of(state)
    accounts = remembered(state, request_id)
    place = next(index for index, account in enumerate(accounts) if account.request_id == request_id)
    traffic, warm = as_traffic(accounts, config.cache.block_size, next(iter(costs.values())))

    def play(sizes: PoolSizes) -> dict[int, tuple[float, float]]:
        answers: dict[int, tuple[float, float]] = {}
        setup = SimulationSetup(msgspec.structs.replace(config, pools=sizes.pools(config.pools)), costs, traffic)
        simulate(setup, on_progress, lambda index, first_s, whole_s: answers.update({index: (first_s, whole_s)}))
        return {index - warm: answer for index, answer in answers.items() if index >= warm}

    as_it_is = play(there)
    if place not in as_it_is:
        raise ConfigurationError(
            "the simulated cluster does not serve this request: is --costs of the nodes that serve, with the cluster's settings?"
        )
    answered = [(accounts[index], times) for index, times in as_it_is.items() if accounts[index].is_whole]
    first_s, whole_s = as_it_is[place]
    others = []
    for what, sizes in alternatives(there):
        times = play(sizes).get(place)
        if times is not None:
            others.append(OtherCluster(what, times[0] - first_s, times[1] - whole_s))
    return OtherClusters(
        requests=len(accounts),
        first_token_s=first_s,
        total_s=whole_s,
        first_token_error=_error((times[0], account.first_token_s) for account, times in answered),
        total_error=_error((times[1], account.total_s) for account, times in answered),
        others=others,
    )


def remembered(state: PageState, request_id: str) -> list[RequestAccount]:
    """All requests that the router remembers, in the order in which they were asked. Raises ConfigurationError if the request is not
    among them, did not end well, or ran beside requests that the router has forgotten."""
    accounts = state.latest
    found = next((account for account in accounts if account.request_id == request_id), None)
    if found is None:
        raise ConfigurationError(
            f"{request_id} is not among the last {LATEST} requests that its router remembers: what ran beside it is not known any more"
        )
    if not found.is_whole:
        raise ConfigurationError("it was not answered to its end: a simulation has nothing to compare it with")
    asked_at = found.ended_at - found.total_s
    if len(accounts) >= LATEST and min(account.ended_at for account in accounts) > asked_at:
        raise ConfigurationError(
            f"more than {LATEST} requests have ended since it was asked: what ran beside it is not known any more"
        )
    return sorted(accounts, key=lambda account: account.ended_at - account.total_s)


def as_traffic(accounts: Sequence[RequestAccount], block_size: int, costs: CostModel) -> tuple[PlayedTraffic, int]:
    """Makes a request of every account. Before them come requests that fill the caches, one for each prefix that was found in a cache;
    also returns how many of these there are."""
    warm: list[TraceRow] = []
    prefixes: list[tuple[int, ...]] = []
    at, name = 0.0, 0
    for account in accounts:
        count = min(account.cached_tokens, account.prompt_tokens) // block_size
        names = tuple(range(name, name + count))
        prefixes.append(names)
        name += count
        if count:
            warm.append(TraceRow(at, count * block_size, 1, names))
            at += _WARM_GAP_S + costs.prefill.at(count * block_size, 0)
    first = accounts[0].ended_at - accounts[0].total_s
    rows = [
        TraceRow(
            at + account.ended_at - account.total_s - first,
            max(account.prompt_tokens, 1),
            max(account.output_tokens, 1),
            names,
        )
        for account, names in zip(accounts, prefixes, strict=True)
    ]
    return PlayedTraffic([*warm, *rows], block_size), len(warm)


def sizes_of(state: PageState) -> PoolSizes:
    sizes = PoolSizes()
    for node in state.nodes:
        if not node.why:
            role = Role(node.role)
            sizes = sizes.with_size(role, sizes.of(role) + 1)
    if not sizes.decode and not sizes.aggregated:
        raise ConfigurationError("no node that writes answers serves now: there is no cluster to compare with")
    return sizes


def alternatives(there: PoolSizes) -> Iterator[tuple[str, PoolSizes]]:
    """Yields clusters with as many nodes in another layout, and clusters with one node more."""
    total = there.prefill + there.decode + there.aggregated
    if there.prefill and there.decode:
        yield "aggregated", PoolSizes(aggregated=total)
    elif there.aggregated > 1 and not there.decode:
        prefill = total // 2
        yield f"{prefill} prefill and {total - prefill} decode", PoolSizes(prefill, total - prefill)
    for role in ENGINE_ROLES:
        if there.of(role):
            yield f"one more {role.value} node", there.with_size(role, there.of(role) + 1)


def _error(pairs: Iterator[tuple[float, float]]) -> float:
    """The median relative error of (simulated, measured) pairs."""
    return median(abs(simulated / measured - 1) for simulated, measured in pairs if measured > 0)
