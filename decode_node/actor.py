"""A decode or aggregated node as a Ray actor: the host's methods, nothing added."""

from __future__ import annotations

import ray

from engine.hosting import NodeHost


# Threads, not asyncio: `start`, `drain` and `hold` block, and `status` must answer meanwhile.
@ray.remote(max_concurrency=16, max_restarts=0)
class DecodeActor(NodeHost):
    def __init__(self, config: bytes) -> None:
        from decode_node.node import DecodeNode

        super().__init__(DecodeNode, config)
