"""The NCCL connector: torch.distributed moves KV blocks, point to point; over gloo if the cache is in host memory.

There is no world that every node must join. Two nodes make a process group of two when they first have something to
transfer, and it ends when either leaves. The sender announces what it will send, so that no thread waits in a
receive, and no kernel on a device, for bytes that may never come.

options    `transfer.options` of this connector
group      torch.distributed: a group of two, with deadlines, whose errors it translates
pool       the KV cache as units, gathered before they are sent and scattered when they arrive; which blocks a peer may
           write
pair       the two ends of a pair, a thread each, and their messages besides the bytes
transport  a `kvtransfer.protocol.transport.Transport` made of pairs
"""

from __future__ import annotations

from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.nccl.options import NcclOptions
from tandem.kvtransfer.nccl.transport import NcclTransport
from tandem.kvtransfer.protocol.halves import SchedulerHalf, WorkerHalf
from tandem.kvtransfer.protocol.settings import parse_direction


def create(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    options = NcclOptions.parse(context.config.options)
    direction = parse_direction(context.config.direction)
    transport = NcclTransport(context.node_id, context.host, options)
    return SchedulerHalf(context.block_size, context.state_blocks), WorkerHalf(
        context, transport, direction, options
    )
