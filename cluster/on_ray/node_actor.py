"""A node as a Ray actor: `NodeHost`'s methods, nothing added.

Every actor can become a node of another role and keep its weights, so each can make all kinds of node. The actor's class
says only with which role it began: Ray shows it as the process's name."""

from __future__ import annotations

from typing import Any

import ray

from tandem.cluster.models.adapters import find_adapter_here
from tandem.cluster.models.store import find_model_here
from tandem.cluster.on_ray.ending import PoliteEnd
from tandem.node.config import NodeConfig
from tandem.node.hosting import NodeHost
from tandem.node.node import Node
from tandem.wire.nodes import Role


def make_node(config: NodeConfig) -> Node[Any]:
    # Imported in the node's own process: the imports take seconds.
    if config.role is Role.PREFILL:
        from tandem.prefill_node.node import PrefillNode

        return PrefillNode(config)
    if config.role is Role.ENCODE:
        from tandem.encode_node.node import EncodeNode

        return EncodeNode(config)
    from tandem.decode_node.node import DecodeNode

    return DecodeNode(config)


class _NodeActor(NodeHost):
    def __init__(self, config: bytes) -> None:
        super().__init__(make_node, config, find_model_here, find_adapter_here)
        self._end = PoliteEnd(self.finish)


# Threads, not asyncio: `start`, `drain` and `hold` block, and `status` must answer while they do.
@ray.remote(max_concurrency=16, max_restarts=0)
class PrefillActor(_NodeActor):
    pass


@ray.remote(max_concurrency=16, max_restarts=0)
class DecodeActor(_NodeActor):
    pass


@ray.remote(max_concurrency=16, max_restarts=0)
class EncodeActor(_NodeActor):
    pass
