"""Plays the requests that routers remember on other sizes of the pools, beside the controller: one simulation at a time, in a thread that
nothing waits for when the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.base.own_thread import in_own_thread
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import CoresView, Expectation, not_foretold
from tandem.cluster.describe import format_seconds
from tandem.cluster.orders import FORETELL_S
from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.foresight.watching import sizes_in, why_not_serving
from tandem.cluster.pools.placement import place
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.state import ClusterState, NodeRecord
from tandem.cluster.pools.wings import Joints
from tandem.cluster.wings import foresight
from tandem.wire.forecasts import ExpectedFigure, Forecast
from tandem.wire.nodes import ENGINE_ROLES, Role

logger = logging.getLogger(__name__)


class Foreteller:
    def __init__(self, joints: Joints) -> None:
        self._pools, self._clock = joints.pools, joints.clock
        self._simulates: Future[Forecast] | None = None

    async def foretell(
        self, before: ClusterState, facts: Facts, wanted: Mapping[Role, int], routers: Sequence[RouterSupervisor]
    ) -> Expectation:
        """`before` and `facts`: as the cluster was before the change. Whatever goes wrong is a sentence."""
        try:
            work = self._foretell(before, facts, wanted, routers)
            forecast = await self._clock.within(FORETELL_S, work, "foretelling")
        except TandemError as error:
            why = str(error)
        except Exception as error:  # a mistake here must not keep an operator from changing the cluster
            logger.warning("what a change will bring cannot be foretold", exc_info=error)
            why = f"{type(error).__name__}: {error}"
        else:
            return Expectation(forecast, said=said(forecast))
        return not_foretold(why)

    async def _foretell(
        self, before: ClusterState, facts: Facts, wanted: Mapping[Role, int], routers: Sequence[RouterSupervisor]
    ) -> Forecast:
        wing, there = foresight(), sizes_in(before)
        if wing is None:
            raise ConfigurationError("this installation has no simulator")
        if not {*wanted} <= {*ENGINE_ROLES}:
            raise ConfigurationError("encoder nodes are not simulated")
        if why := why_not_serving(there, before, facts):
            raise ConfigurationError(why)
        if not routers:
            raise Unavailable("no router is ready")
        config = self._pools.config
        told = await asyncio.gather(*(router.recalled() for router in routers))
        if silent := [router.name for router, each in zip(routers, told, strict=True) if not each]:
            raise Unavailable(f"{', '.join(silent)} did not tell what its requests took")
        while (earlier := self._simulates) is not None and not earlier.done():
            with contextlib.suppress(Exception):  # it was said to who asked
                await asyncio.wrap_future(earlier)
        cores = cores_now_and_then(config, before, facts, wanted)
        self._simulates = in_own_thread(
            "foretell", lambda: wing.foretell(told, there, wanted, config, (cores.now, cores.then))
        )
        return await asyncio.wrap_future(self._simulates)


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


def cores_now_and_then(
    config: TandemConfig, state: ClusterState, facts: Facts, wanted: Mapping[Role, int]
) -> CoresView:
    there = sizes_in(state)
    return CoresView(cores_of(config, state, facts, there), cores_of(config, state, facts, {**there, **wanted}))


# On a machine with fewer cores than nodes a node more brings nothing where the others use theirs all the time.
def cores_of(
    config: TandemConfig, state: ClusterState, facts: Facts, sizes: Mapping[Role, int]
) -> dict[Role, list[frozenset[str]]]:
    """The cores of the nodes that there would be: those that are there first, then as new ones would be placed. {} if one computes on a
    device, or has no machine with room."""
    nodes = [record for record in state.nodes if record.role not in ENGINE_ROLES]
    for role in ENGINE_ROLES:
        size, there = sizes.get(role, 0), [record for record in state.nodes if record.role is role]
        nodes += there[:size]
        for number in range(len(there), size):
            placement = place(config, facts.hosts, nodes, role, state.closed)
            nodes.append(NodeRecord(f"another {role.value} node {number}", role, placement))
    if any(record.placement is None or record.placement.device.startswith("cuda") for record in nodes):
        return {}
    found: dict[Role, list[frozenset[str]]] = {}
    for record in nodes:
        parts = record.placement.parts if record.placement is not None else []
        found.setdefault(record.role, []).append(
            frozenset(f"{part.host} {core}" for part in parts for core in part.cores)
        )
    return found
