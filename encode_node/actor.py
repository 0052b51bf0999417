"""An encoder node as a Ray actor: `NodeHost`'s methods, nothing added."""

import ray

from tandem.node.hosting import NodeHost


# Threads, not asyncio: `start`, `drain` and `hold` block, and `status` must answer while they do.
@ray.remote(max_concurrency=16, max_restarts=0)
class EncodeActor(NodeHost):
    """Began in this role, which is what Ray shows as the process's name. It can become a node of another and keep its weights."""
