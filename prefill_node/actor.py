"""A prefill node as a Ray actor: the host's methods, nothing added."""

from __future__ import annotations

import ray

from engine.hosting import FindModel, NodeHost


# Threads, not asyncio: `start`, `drain` and `hold` block, and `status` must answer meanwhile.
@ray.remote(max_concurrency=16, max_restarts=0)
class PrefillActor(NodeHost):
    def __init__(self, config: bytes, find_model: FindModel | None = None) -> None:
        from prefill_node.node import PrefillNode

        super().__init__(PrefillNode, config, find_model)
