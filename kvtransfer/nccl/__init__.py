"""The NCCL connector: torch.distributed moves KV blocks, point to point; over gloo if the cache is in host memory.
README.md lists the files."""

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
    return SchedulerHalf(context.block_size, context.state_blocks), WorkerHalf(context, transport, direction, options)
