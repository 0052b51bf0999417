"""The NCCL connector: KV blocks move by torch.distributed, point to point; by gloo where the cache is in host memory.

There is no world that every node has to be in. Two nodes that have something to transfer make a process group of two,
when they first need it; it ends when either leaves. What is to be sent is announced first, so that no thread waits in a
receive, and no kernel on a device, for something that may never come.

options    `transfer.options`
group      torch.distributed: a group of two, deadlines, errors translated into ours
pool       the KV cache as units: gathered before they are sent, scattered when they arrive; which blocks a peer may write
pair       the two ends of a pair, a thread each, and what they say to each other beside the bytes
transport  all of it as a `kvtransfer.protocol.transport.Transport`
"""

from __future__ import annotations

from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.nccl.options import NcclOptions
from tandem.kvtransfer.nccl.transport import NcclTransport
from tandem.kvtransfer.protocol.halves import SchedulerHalf, WorkerHalf
from tandem.kvtransfer.protocol.side import parse_direction


def create(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    options = NcclOptions.parse(context.config.options)
    direction = parse_direction(context.config.direction)
    transport = NcclTransport(context.node_id, context.host, options)
    return SchedulerHalf(context.block_size, context.state_blocks), WorkerHalf(
        context, transport, direction, options
    )
