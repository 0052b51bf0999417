"""The NIXL connector: KV blocks move between the nodes' memory by RDMA, shared memory or TCP, whatever UCX finds.

interfaces  on which network devices UCX listens
lanes       over which lanes UCX moves blocks, read from its own log
transport   a `kvtransfer.protocol.transport.Transport` over NIXL, whose errors it translates
ranks/      the same if the ranks of a node, or of its peers, keep their heads apart
staging     the same through a copy in host memory, for a cache on a GPU
options     `transfer.options` of this connector
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wing
from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.staging import StagedTransport
from tandem.kvtransfer.nixl.transport import NixlAgent, NixlTransport
from tandem.kvtransfer.protocol.halves import SchedulerHalf, WorkerHalf
from tandem.kvtransfer.protocol.settings import parse_direction
from tandem.kvtransfer.protocol.transport import Direction, Transport

# Where it was deleted, blocks move only between nodes of one rank.
_RANKS = "tandem.kvtransfer.nixl.ranks.sharded"


def create(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    options = NixlOptions.parse(context.config.options)
    direction = parse_direction(context.config.direction)
    agent = NixlAgent(f"{context.node_id}-{context.epoch:x}", options, context.host, context.near)
    transport = transport_over(agent, context.rank_lines)
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


def transport_over(agent: NixlAgent, lines: Sequence[socket.socket]) -> Transport:
    if ranks := find_wing(_RANKS):
        transport: Transport = ranks.ShardedTransport(agent, lines)
        return transport
    return NixlTransport(agent)
