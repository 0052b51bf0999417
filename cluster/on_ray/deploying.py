"""A deployment put together out of Ray's parts: what the controller's process does when it begins."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import msgspec
import ray

from tandem.cluster.config import TandemConfig
from tandem.cluster.events import Events
from tandem.cluster.hosts import Hosts
from tandem.cluster.on_ray.hosts import RayHosts
from tandem.cluster.on_ray.launcher import RayLauncher
from tandem.cluster.on_ray.state_store import RayStateStore
from tandem.cluster.pools.deployment import Deployment
from tandem.cluster.pools.local_hosts import ThisMachine
from tandem.cluster.pools.placement import this_machine
from tandem.cluster.pools.places import needs_of

LOCAL_HOST = "127.0.0.1"  # where routers and nodes of one machine reach each other
STATE = "controller"
MACHINES = "machines"

logger = logging.getLogger(__name__)


class Place(msgspec.Struct, frozen=True):
    """Where a deployment runs."""

    own_ray: bool  # a Ray that was started for it, on one machine, and ends with it
    detached: bool  # it goes on when the command that started it has ended


def deployment_maker(place: bytes) -> Callable[[TandemConfig, Events], Deployment]:
    where = msgspec.msgpack.decode(place, type=Place)
    # The controller is what an operator reads about; the rest of what is imported here speaks up when it matters.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def make(config: TandemConfig, events: Events) -> Deployment:
        needs = needs_of(config)
        address = LOCAL_HOST if where.own_ray else ray.util.get_node_ip_address()
        hosts: Hosts = (
            ThisMachine(this_machine(), address)
            if where.own_ray
            else RayHosts(RayStateStore(MACHINES), needs, say=functools.partial(events.trouble, "machines"))
        )
        launcher = RayLauncher(config.timeouts.stop_s, needs, detached=where.detached)
        return Deployment(reachable(config, address), hosts, launcher, RayStateStore(STATE), events)

    return make


def reachable(config: TandemConfig, address: str) -> TandemConfig:
    """Nodes on other machines answer the router at an address of its machine, unless the operator names one."""
    replace = msgspec.structs.replace
    if config.router.inbox_host != LOCAL_HOST:
        return config
    return replace(config, router=replace(config.router, inbox_host=address))


def end_this_process() -> None:
    """Ray starts the controller again, and the new one comes back to the nodes."""
    logger.error("this controller ends, so that another one can go on")
    logging.shutdown()
    os._exit(1)
