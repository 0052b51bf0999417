"""A router as a Ray actor: `RouterHost`'s methods, nothing added."""

from __future__ import annotations

import asyncio

import ray

from tandem.cluster.models.store import find_model_here
from tandem.cluster.on_ray.ending import PoliteEnd
from tandem.cluster.on_ray.operating import RayControl
from tandem.router.hosting import RouterHost


@ray.remote(max_restarts=0)
class RouterActor(RouterHost):
    """`namespace` is the deployment's, in which the controller's actor is found."""

    def __init__(self, config: bytes, namespace: str) -> None:
        super().__init__(config, find_model_here, RayControl(namespace))
        loop = asyncio.get_event_loop()
        self._end = PoliteEnd(lambda: asyncio.run_coroutine_threadsafe(self.finish(), loop).result())
