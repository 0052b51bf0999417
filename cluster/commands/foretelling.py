"""What a change of the pools' sizes is expected to bring, said before it is ordered, and told to the cluster, which grades it. Whatever goes
wrong here is a sentence: the change is made all the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.base.errors import TandemError, Unavailable
from tandem.cluster.control import ClusterView
from tandem.cluster.describe import format_seconds
from tandem.cluster.orders import ConfigurationOrder, ForecastOrder, OperatedCluster, ViewOrder
from tandem.cluster.tasks import in_own_thread, saying_if_slow
from tandem.cluster.wings import ForesightWing, foresight
from tandem.wire.forecasts import ExpectedFigure, Forecast
from tandem.wire.nodes import Role

logger = logging.getLogger(__name__)

LIMIT_S = 12.0  # for everything before the change

Say = Callable[[str], None]
SizesOf = Callable[[ClusterView], Mapping[Role, int]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Expectation:
    forecast: Forecast | None = None
    why_not: str = ""  # "" with no forecast: nothing changes

    def as_json(self) -> dict[str, Any]:
        return {"forecast": self.forecast, **({"not_foretold": self.why_not} if self.why_not else {})}


async def foretold(
    cluster: OperatedCluster, wanted: SizesOf, change: Callable[[], Awaitable[T]], say: Say, url: str | None = None
) -> tuple[T, Expectation]:
    """Says what the change to these sizes is expected to bring, makes the change, and has the cluster keep what was said."""
    expected = await _expect(cluster, wanted, say, url)
    if expected.forecast is not None:
        say(said(expected.forecast))
    elif expected.why_not:
        say(f"what it will bring is not foretold: {expected.why_not}")
    done = await change()
    if expected.forecast is not None:
        try:
            await cluster.ask(ForecastOrder(expected.forecast))
        except TandemError as error:
            say(f"the forecast will not be graded: {error}")
    return done, expected


async def _expect(cluster: OperatedCluster, wanted: SizesOf, say: Say, url: str | None) -> Expectation:
    wing = foresight()
    if wing is None:
        return Expectation(why_not="this installation has no simulator")
    try:
        async with asyncio.timeout(LIMIT_S):
            return Expectation(await _ask(wing, cluster, wanted, say, url))
    except TimeoutError:
        why = f"that took more than {LIMIT_S:.0f} s"
    except TandemError as error:
        why = str(error)
    except Exception as error:  # a mistake here must not keep an operator from changing the cluster
        logger.warning("what the change will bring cannot be foretold", exc_info=error)
        why = f"{type(error).__name__}: {error}"
    return Expectation(why_not=why)


async def _ask(
    wing: ForesightWing, cluster: OperatedCluster, wanted: SizesOf, say: Say, url: str | None
) -> Forecast | None:
    view = await cluster.ask(ViewOrder())
    sizes, there = wanted(view), {pool.role: pool.wanted for pool in view.pools}
    if all(there.get(role, 0) == size for role, size in sizes.items()):
        return None
    # Router processes of one port answer for each other.
    urls = list(dict.fromkeys(router.url for router in view.routers if router.phase == "ready"))
    if not urls:
        raise Unavailable("no router is ready")
    if url is not None and len(urls) == 1:
        urls = [url]  # the one that this machine reaches it by
    config = await cluster.ask(ConfigurationOrder())
    work = asyncio.wrap_future(in_own_thread("foretell", lambda: wing.foretell(urls, sizes, config)))
    return await saying_if_slow(work, lambda: say("simulating what it will bring: a few seconds, then the change"))


def after_role(view: ClusterView, node_id: str, role: Role) -> Mapping[Role, int]:
    """Returns the sizes after this node has become one of another role."""
    before = next((node.role for node in view.nodes if node.node_id == node_id), role)
    there = {pool.role: pool.wanted for pool in view.pools}
    return {before: there.get(before, 0) - 1, role: there.get(role, 0) + 1} if before is not role else {}


def said(forecast: Forecast) -> str:
    figures = [_said(one) for one in forecast.expected if one.what.endswith("p90")]
    busy = [
        f"{role} nodes {f'{forecast.busy_now[role]:.0%} → ' if role in forecast.busy_now else ''}{share:.0%} busy"
        for role, share in forecast.busy_then.items()
    ]
    return f"expected, by the last {forecast.requests} requests: {'; '.join([*figures, *busy])}"


def _said(one: ExpectedFigure) -> str:
    measured, then, low, high = map(format_seconds, (one.measured, one.then, one.low, one.high))
    return f"{one.what} {measured} → {then} ({low} to {high})"
