from __future__ import annotations

import socket

from tandem.kvtransfer.base import ConnectorContext, KVCacheMemory
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.protocol.halves import WorkerHalf
from tandem.kvtransfer.protocol.transport import Direction, HandleId, Move, RemoteId, Transport
from tandem.wire.handoff import CacheMemory
from tests.wire.members import address_of


class ClosingTransport(Transport):
    """Notes whether a socket listened at an address when it was closed."""

    name = "closing"
    endpoint = ""
    was_reachable = False

    def close(self) -> None:
        host, port = address_of(self.endpoint)
        with socket.create_connection((host, int(port)), timeout=5):
            self.was_reachable = True

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        raise NotImplementedError

    def connect(self, memory: CacheMemory) -> RemoteId:
        raise NotImplementedError

    def disconnect(self, remote: RemoteId) -> None:
        raise NotImplementedError

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        raise NotImplementedError

    def is_done(self, handle: HandleId) -> bool:
        raise NotImplementedError


def test_a_node_that_nobody_listens_for_any_more_writes_nothing_any_more() -> None:
    """Peers reuse their blocks when they find its address closed."""
    transport = ClosingTransport()
    context = ConnectorContext("n", 1, "127.0.0.1", 4, TransferConfig(), wake=lambda: None)
    worker = WorkerHalf(context, transport, Direction.PUSH)
    transport.endpoint = worker.peer_endpoint
    worker.shutdown()
    assert transport.was_reachable
