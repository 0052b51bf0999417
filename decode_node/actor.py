"""A decode or aggregated node as a Ray actor: the host's methods, nothing added."""

from __future__ import annotations

import ray

from engine.hosting import FindModel, NodeHost


# Threads, not asyncio: `start`, `drain` and `hold` block, and `status` must answer meanwhile.
@ray.remote(max_concurrency=16, max_restarts=0)
class DecodeActor(NodeHost):
    def __init__(self, config: bytes, find_model: FindModel | None = None) -> None:
        from decode_node.node import DecodeNode

        super().__init__(DecodeNode, config, find_model)
