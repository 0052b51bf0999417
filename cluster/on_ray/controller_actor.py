"""The controller as a Ray actor: `ControllerHost`'s methods, nothing added. Ray restarts it when it is killed, and it then
adopts the nodes and routers that are still running."""

from __future__ import annotations

from typing import Any

import msgspec
import ray

from tandem.cluster.config import TandemConfig
from tandem.cluster.on_ray.deploying import RayPlatform
from tandem.cluster.on_ray.exchange import ControllerParts, only_with
from tandem.cluster.on_ray.runtime import CONTROLLER, HEAD_ONLY, namespace_of
from tandem.cluster.pools.controller_host import ControllerHost


@ray.remote(num_cpus=0, max_restarts=-1)
class ControllerActor(ControllerHost):
    """`place` is an encoded `cluster.on_ray.deploying.DeploymentPlace`."""

    def __init__(self, config: bytes, place: bytes) -> None:
        super().__init__(config, RayPlatform(place, make_controller))


def make_controller(parts: ControllerParts, name: str) -> Any:
    """Creates the controller's actor. When two processes call this at once, both get the same actor."""
    actor: Any = ControllerActor
    config = msgspec.msgpack.decode(parts.config, type=TandemConfig)
    return actor.options(
        name=CONTROLLER,
        namespace=namespace_of(name),
        lifetime="detached",
        get_if_exists=True,
        resources=HEAD_ONLY,
        runtime_env=only_with(config.controller.env),
    ).remote(parts.config, parts.place)
