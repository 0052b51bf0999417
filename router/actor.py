"""The router as a Ray actor: the host's methods, nothing added."""

from __future__ import annotations

import ray

from router.hosting import RouterHost


@ray.remote(max_restarts=0)
class RouterActor(RouterHost):
    pass
