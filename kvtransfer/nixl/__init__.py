"""The NIXL connector: KV blocks move between the nodes' memory by RDMA, shared memory or TCP, whatever UCX finds.

interfaces  on which network devices UCX listens
lanes       over which lanes UCX moves blocks, read from its own log
transport   a `kvtransfer.protocol.transport.Transport` over NIXL, whose errors it translates
sharded     the same if the ranks of a node, or of its peers, keep their heads apart: splits each move
rank_lines  the messages between rank 0 and another rank of its node, and the line that carries them
rank_thread another rank's part of transfers
staging     the same through a copy in host memory, for a cache on a GPU
options     `transfer.options` of this connector
"""

from __future__ import annotations

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.sharded import ShardedTransport
from tandem.kvtransfer.nixl.staging import StagedTransport
from tandem.kvtransfer.nixl.transport import NixlAgent
from tandem.kvtransfer.protocol.halves import SchedulerHalf, WorkerHalf
from tandem.kvtransfer.protocol.settings import parse_direction
from tandem.kvtransfer.protocol.transport import Direction, Transport


def create(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    options = NixlOptions.parse(context.config.options)
    direction = parse_direction(context.config.direction)
    agent = NixlAgent(f"{context.node_id}-{context.epoch:x}", options, context.host)
    transport: Transport = ShardedTransport(agent, context.rank_lines)
    if options.staging == "host":
        if context.rank_lines:
            raise ConfigurationError(
                "transfer.options.staging: host copies the KV of one GPU, and each of this node's ranks keeps its heads on one of its "
                "own: set it to none, or tensor_parallel to 1"
            )
        if direction is Direction.PULL:
            raise ConfigurationError(
                "transfer.options.staging: host needs transfer.direction: push; with pull nothing would be in host memory "
                "when a peer reads it"
            )
        transport = StagedTransport(transport)
    worker = WorkerHalf(context, transport, direction, options)
    return SchedulerHalf(context.block_size, context.state_blocks), worker
