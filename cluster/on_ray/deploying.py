"""Builds a deployment from Ray's parts, and ends one. The controller's process runs this."""

from __future__ import annotations

import asyncio
import functools
import logging
import os

import msgspec
import ray

from tandem.base.errors import TandemError
from tandem.base.logs import begin_logging
from tandem.cluster.config import DEFAULT_NAME, TandemConfig
from tandem.cluster.control import ExchangeView
from tandem.cluster.events import Events
from tandem.cluster.launcher import Hosts
from tandem.cluster.models.resolved import fix_model
from tandem.cluster.on_ray.exchange import EXCHANGE, MADE_WITH, MakeController, begin_exchange, exchange_of
from tandem.cluster.on_ray.handles import end_actor
from tandem.cluster.on_ray.hosts import RayHosts
from tandem.cluster.on_ray.launcher import RayLauncher
from tandem.cluster.on_ray.neighbours import STATE, WANTED, WANTED_LABELS, Neighbours, stands
from tandem.cluster.on_ray.runtime import CONTROLLER, has_job_ended, namespace_of
from tandem.cluster.on_ray.state_store import RayStateStore
from tandem.cluster.pools.deployment import Deployment
from tandem.cluster.pools.placement import ThisMachine, this_machine
from tandem.cluster.pools.room import needs_of

LOCAL_HOST = "127.0.0.1"  # where the routers and nodes of a single machine reach each other
MACHINES = "machines"
_OWNER_PERIOD_S = 1.0
KILL_S = 60.0  # for Ray to take the order to kill one process, when a whole deployment ends

logger = logging.getLogger(__name__)


class DeploymentPlace(msgspec.Struct, frozen=True):
    """Where a deployment runs, and how long it lives."""

    own_ray: bool  # it has a Ray of its own on one machine, which ends with it
    deployment: str  # its id; no two deployments have the same
    job: str = ""  # Ray's id of the command whose end ends the deployment; "" if it outlives its command
    name: str = DEFAULT_NAME


def ending_store(deployment: str, name: str) -> RayStateStore:
    """Holds a ClusterEnd once the end of this deployment has been decided."""
    return RayStateStore(f"ended-{deployment}", namespace_of(name))


class RayPlatform:
    """Implements `cluster.pools.controller_host.Platform`."""

    def __init__(self, place: bytes, make: MakeController) -> None:
        self._make = make
        self._given = place
        self._place = msgspec.msgpack.decode(place, type=DeploymentPlace)
        self.id = self._place.deployment
        self._name = self._place.name
        self._namespace = namespace_of(self._name)
        self.endings = ending_store(self.id, self._name)

    def deployment(self, config: TandemConfig, events: Events) -> Deployment:
        begin_logging(config.logs, "controller")
        own_ray = self._place.own_ray
        address = LOCAL_HOST if own_ray else ray.util.get_node_ip_address()
        hosts: Hosts = (
            ThisMachine(this_machine(), address)
            if own_ray
            else RayHosts(
                RayStateStore(MACHINES, self._namespace),
                needs_of(config),
                say=functools.partial(events.trouble, "machines"),
                neighbours=Neighbours(self._name),
            )
        )
        launcher = RayLauncher(config.timeouts.stop_s, namespace=self._namespace)
        store = RayStateStore(STATE, self._namespace)
        return Deployment(reachable(config, address), hosts, launcher, store, events, fix_model=fix_model)

    async def exchange(self) -> ExchangeView | None:
        exchange = await exchange_of(self._name)
        return None if exchange is None else exchange.view

    async def begin_exchange(self, old: TandemConfig, new: TandemConfig) -> str:
        return await begin_exchange(self._name, old, new, self._given, self._make)

    async def owner_ended(self) -> str:
        """Waits until the command that this deployment belongs to has ended, and returns the reason. Never returns if it
        belongs to none. Ray's control store records a job's end when its process is gone."""
        if not self._place.job:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(_OWNER_PERIOD_S)
            if await self._has_owner_ended():
                return "the command that started it has ended"

    async def _has_owner_ended(self) -> bool:
        try:
            return await asyncio.to_thread(has_job_ended, self._place.job)
        except TandemError as error:
            logger.warning("Ray did not say whether the command that started this deployment still runs: %s", error)
            return False

    def restart(self) -> None:
        """Ends this process. Ray starts the controller again, and it adopts the nodes that are running."""
        logger.error("the controller ends its process, so that Ray starts it again")
        logging.shutdown()
        os._exit(1)

    async def end(self) -> None:
        """Ends every other process of the deployment, then this one."""
        await clear_away(self._name, but=CONTROLLER)
        me = ray.get_runtime_context().current_actor
        await asyncio.to_thread(ray.kill, me, no_restart=True)


async def left_behind(deployment: str, but: str = "") -> list[str]:
    """Returns the names of the deployment's actors that are still running, except `but`."""
    named, namespace = await asyncio.to_thread(ray.util.list_named_actors, True), namespace_of(deployment)
    return [one["name"] for one in named if one["namespace"] == namespace and one["name"] != but]


async def clear_away(deployment: str, but: str = "") -> None:
    """Kills the deployment's remaining actors, except `but`, and deletes all that it kept in Ray's store. Only for a
    deployment whose end has been recorded."""
    namespace = namespace_of(deployment)
    # First what a controller that stood still looks for when it wakes up, so that it starts nothing after the others have been killed.
    await RayStateStore(STATE, namespace).forget()
    for name in await left_behind(deployment, but):
        await end_actor(name, namespace, KILL_S)
    for store in (MACHINES, WANTED, WANTED_LABELS, EXCHANGE, MADE_WITH):
        await RayStateStore(store, namespace).forget()
    await stands(deployment).forget()


def reachable(config: TandemConfig, address: str) -> TandemConfig:
    """Returns the configuration with `address` as the routers' inbox host, so that nodes on other machines can reach it.
    An address that stands there already stays."""
    replace = msgspec.structs.replace
    if config.router.inbox_host != LOCAL_HOST:
        return config
    return replace(config, router=replace(config.router, inbox_host=address))
