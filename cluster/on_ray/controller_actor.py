"""The controller as a Ray actor: the host's methods, nothing added. Killed, it is started again by Ray, and comes
back to the nodes that it left."""

from __future__ import annotations

import ray

from tandem.cluster.on_ray.deploying import RayPlatform
from tandem.cluster.pools.controller_host import ControllerHost


@ray.remote(num_cpus=0, max_restarts=-1)
class ControllerActor(ControllerHost):
    """`place`: how and where it runs, as `cluster.on_ray.deploying.Place`."""

    def __init__(self, config: bytes, place: bytes) -> None:
        super().__init__(config, RayPlatform(place))
