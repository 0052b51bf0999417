"""How a router reaches the controller when an operator calls its cluster API."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError

from tandem.base.errors import Unavailable
from tandem.cluster.on_ray.errors import answer, translated
from tandem.cluster.on_ray.runtime import CONTROLLER


class RayControl:
    """Implements `router.http.services.ClusterControl`. Looks the controller's actor up at each call, because it may have been
    replaced since the last one."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def act(self, action: str, body: bytes) -> bytes:
        controller = await asyncio.to_thread(_controller, self._namespace)
        return bytes(await answer(controller.act.remote(action, body)))


def _controller(namespace: str) -> Any:
    try:
        return ray.get_actor(CONTROLLER, namespace)
    except ValueError:
        raise Unavailable(
            "the cluster has no controller just now: it goes on serving; try again in a few seconds"
        ) from None
    except RayError as error:
        raise translated(error) from error
