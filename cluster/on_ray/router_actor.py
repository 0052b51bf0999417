"""A router as a Ray actor: `RouterHost`'s methods, nothing added."""

from __future__ import annotations

import asyncio

import ray

from tandem.base.errors import Unavailable
from tandem.cluster.models.store import find_model_here
from tandem.cluster.on_ray.ending import PoliteEnd
from tandem.cluster.on_ray.errors import answer, find_actor
from tandem.cluster.on_ray.runtime import CONTROLLER
from tandem.router.hosting import RouterHost


class RayControl:
    """Implements `router.http.services.ClusterControl`. Looks the controller's actor up at each call, because it may have been
    replaced since the last one."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def act(self, action: str, body: bytes) -> bytes:
        controller = await asyncio.to_thread(find_actor, CONTROLLER, self._namespace)
        if controller is None:
            raise Unavailable("the cluster has no controller just now: it goes on serving; try again in a few seconds")
        return bytes(await answer(controller.act.remote(action, body)))


@ray.remote(max_restarts=0)
class RouterActor(RouterHost):
    """`namespace` is the deployment's, in which the controller's actor is found."""

    def __init__(self, config: bytes, namespace: str) -> None:
        super().__init__(config, find_model_here, RayControl(namespace))
        loop = asyncio.get_event_loop()
        self._end = PoliteEnd(lambda: asyncio.run_coroutine_threadsafe(self.finish(), loop).result())
