"""A Transport made of pairs. It keeps the pair of each connection, and passes each message to its pair."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Sequence

import msgspec

from tandem.base.errors import InternalError, NodeLost, TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nccl.group import choose_backend
from tandem.kvtransfer.nccl.options import NcclOptions
from tandem.kvtransfer.nccl.pair import (
    Announce,
    Landed,
    Leave,
    Open,
    PairCallee,
    PairCaller,
    PairContext,
    PairMessage,
    Rendezvous,
)
from tandem.kvtransfer.nccl.pool import BlockGate, CacheUnits
from tandem.kvtransfer.protocol.transport import HandleId, Move, RemoteId, Transport
from tandem.wire.endpoints import parse_endpoint
from tandem.wire.handoff import CacheMemory
from tandem.wire.sockets import Inbox, Outbox

logger = logging.getLogger(__name__)

MAX_CALLEES = 1024
CLOSE_S = 5.0


class NcclTransport(Transport):
    name = "nccl"

    def __init__(self, node_id: str, host: str, options: NcclOptions) -> None:
        self._node_id = node_id
        self._host = host
        self._options = options
        self._gate = BlockGate()
        self._key = secrets.token_bytes(16)
        self._node: PairContext | None = None
        self._inbox: Inbox[PairMessage] | None = None
        self._outbox = Outbox()
        self._ids = itertools.count(1)
        self._remotes: dict[RemoteId, PairCaller] = {}
        self._owners: dict[HandleId, PairCaller] = {}
        self._lock = threading.Lock()  # guards the next two, which the inbox's and the pairs' threads read
        self._callers: dict[str, PairCaller] = {}
        self.callees: dict[str, PairCallee] = {}
        self._leaving: list[PairCaller | PairCallee] = []
        self._closed = False
        self.refused = 0  # messages that name no pair of ours

    # ── Transport ──

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        tensor = memory.tensor
        backend = choose_backend(self._options.backend, tensor.device)
        pool = CacheUnits(tensor, memory.block_bytes)
        self._node = PairContext(self._node_id, self._host, backend, self._options, pool, self._gate, self._send)
        self._inbox = Inbox(self._host, PairMessage, self._on_message, name=f"{self._node_id}-pairs")
        return CacheMemory(
            agent_metadata=msgspec.msgpack.encode(Rendezvous(self._inbox.endpoint, self._key, backend)),
            memory_type="VRAM" if tensor.is_cuda else "DRAM",
            device_id=tensor.get_device() if tensor.is_cuda else 0,
            base_address=tensor.data_ptr(),
            num_blocks=memory.num_blocks,
            block_bytes=memory.block_bytes,
        )

    def connect(self, memory: CacheMemory) -> RemoteId:
        node = self._node
        if node is None or self._inbox is None:
            raise InternalError("a connection before the KV cache was registered")
        try:
            peer = msgspec.msgpack.decode(memory.agent_metadata, type=Rendezvous)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransferError(f"this peer cannot be reached by torch.distributed: {error}") from error
        if parse_endpoint(peer.endpoint) is None or peer.backend != node.backend:
            raise TransferError(
                f"this peer is reached by {peer.backend!r} at {peer.endpoint!r}, here by {node.backend!r}"
            )
        remote = RemoteId(next(self._ids))
        self._remotes[remote] = self._call(node, peer, self._inbox.endpoint)
        return remote

    def _call(self, node: PairContext, peer: Rendezvous, reply_to: str) -> PairCaller:
        """Returns a new pair. Its own thread connects, so the caller does not wait."""
        caller = PairCaller(node, peer, reply_to)
        with self._lock:
            self._callers[caller.pair_id] = caller
        caller.start()
        return caller

    def disconnect(self, remote: RemoteId) -> None:
        caller = self._remotes.pop(remote)
        caller.close()
        self._leave(caller)
        self._outbox.forget(caller.peer.endpoint)

    def _leave(self, caller: PairCaller) -> None:
        with self._lock:
            self._callers.pop(caller.pair_id, None)
        self._leaving = [end for end in self._leaving if not end.join(0)] + [caller]

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        if self._inbox is None or self._node is None or self._inbox.died is not None:
            raise TransferError("the thread that serves this node's pairs has died")
        handle = HandleId(next(self._ids))
        caller = self._remotes[remote]
        if not caller.post(handle, move):
            self._leave(caller)
            caller = self._call(self._node, caller.peer, self._inbox.endpoint)
            self._remotes[remote] = caller
            caller.post(handle, move)
        self._owners[handle] = caller
        return handle

    def is_done(self, handle: HandleId) -> bool:
        try:
            done = self._owners[handle].is_done(handle)
        except TransferError:
            del self._owners[handle]
            raise
        if done:
            del self._owners[handle]
        return done

    def cancel(self, handle: HandleId) -> bool:
        over = self._owners[handle].cancel(handle)
        if over:
            del self._owners[handle]
        return over

    def expect(self, transfer_id: str, blocks: Sequence[int]) -> None:
        self._gate.expect(transfer_id, blocks)

    def expect_no_more(self, transfer_id: str) -> bool:
        self._gate.expect_no_more(transfer_id)
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for remote in list(self._remotes):
            self.disconnect(remote)
        with self._lock:
            ends = [*self._leaving, *self.callees.values()]
        for end in ends:
            end.close()
        until = time.monotonic() + CLOSE_S
        for end in ends:
            if not end.join(max(0.0, until - time.monotonic())):
                logger.error("%s: a pair's thread did not end within %g s", self._node_id, CLOSE_S)
        if self._inbox is not None:
            self._inbox.close()
        self._outbox.close()

    @property
    def malformed_frames(self) -> int:
        return self._inbox.malformed if self._inbox is not None else 0

    # ── the pairs' threads ──

    def _send(self, endpoint: str, message: msgspec.Struct) -> None:
        try:
            self._outbox.send(endpoint, message)
        except NodeLost as error:
            raise TransferError(str(error)) from error

    def _on_ended(self, pair_id: str) -> None:
        with self._lock:
            self.callees.pop(pair_id, None)

    # ── the inbox's thread ──

    def _on_message(self, message: PairMessage) -> None:
        if isinstance(message, Open):
            self._open(message)
            return
        with self._lock:
            caller = self._callers.get(message.pair_id)
            callee = self.callees.get(message.pair_id)
        match message:
            case Landed() if caller is not None:
                caller.landed(message)
            case Announce() if callee is not None:
                callee.announce(message)
            case Leave() if callee is not None:
                callee.close()
            case _:
                self.refused += 1

    def _open(self, message: Open) -> None:
        node = self._node
        if node is None or self._closed or not secrets.compare_digest(message.key, self._key):
            self.refused += 1
            return
        with self._lock:
            before = [callee for callee in self.callees.values() if callee.caller == message.caller]
            full = len(self.callees) >= MAX_CALLEES or message.pair_id in self.callees
        if full:
            self.refused += 1
            return
        for callee in before:  # the caller was restarted, or gave its end up
            callee.close()
        with self._lock:
            callee = self.callees[message.pair_id] = PairCallee(node, message, self._on_ended)
        callee.start()
