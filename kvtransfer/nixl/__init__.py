"""The NIXL connector: KV blocks move between the nodes' memory by RDMA, shared memory or TCP, whatever UCX finds.

agent      NIXL's interface and errors, translated into ours
lanes      which way UCX moves them, from its own log
transport  the agent as a `kvtransfer.protocol.transport.Transport`
options    `transfer.options` of this connector
"""

from __future__ import annotations

from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.nixl.agent import NixlAgent
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.transport import NixlTransport
from tandem.kvtransfer.protocol.scheduler_half import SchedulerHalf
from tandem.kvtransfer.protocol.settings import parse_direction
from tandem.kvtransfer.protocol.worker_half import WorkerHalf


def create(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    options = NixlOptions.parse(context.config.options)
    direction = parse_direction(context.config.direction)
    agent = NixlAgent(f"{context.node_id}-{context.epoch:x}", options)
    worker = WorkerHalf(context, NixlTransport(agent), direction, options)
    return SchedulerHalf(context.block_size, context.state_blocks), worker
