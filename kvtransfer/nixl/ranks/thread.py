"""Another rank's part of transfers: a thread beside the computing one, with a NIXL agent of its own. It moves the
blocks of the rank's heads as rank 0 says.

It knows no requests and no protocol. It ends with its line, at the latest when rank 0's process ends, and never
keeps its own process alive.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np

from tandem.base.errors import InternalError, TandemError, TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl.ranks.lines import (
    CacheOpened,
    CloseCache,
    CloseEarlierWays,
    ConnectPeer,
    Done,
    Failure,
    ForgetPeer,
    HeadsSummed,
    MessageLine,
    MoveOver,
    OpenCache,
    OpenWay,
    PostMove,
    SumUp,
    ToRank,
    WayOpened,
)
from tandem.kvtransfer.nixl.transport import NixlAgent, NixlTransport
from tandem.kvtransfer.protocol.cache_map import layout_of
from tandem.kvtransfer.protocol.checksums import CacheChecksums
from tandem.kvtransfer.protocol.shards import shard_of
from tandem.kvtransfer.protocol.transport import HandleId, Move, Operation, RemoteId

logger = logging.getLogger(__name__)

_LOOK_S = 0.001  # between two looks at moves in flight


class RankTransfers:
    """`failed` is called from the thread when a bug ends it: rank 0 then gets no answers, so the process must end.
    `host`: this machine's address, if it is not rank 0's machine. `near`: see `ConnectorContext`."""

    def __init__(
        self,
        sock: socket.socket,
        memory: KVCacheMemory,
        failed: Callable[[], None],
        host: str = "",
        near: Sequence[str] = (),
    ) -> None:
        self._host, self._near = host, near
        self._line = MessageLine(sock, ToRank)
        self._memory = memory
        self._failed = failed
        self._checksums = CacheChecksums(memory)
        self._transport: NixlTransport | None = None
        self._remotes: dict[int, RemoteId | str] = {}  # a str says why there is no connection
        self._in_flight: dict[HandleId, int] = {}  # each handle's move, by the move's number
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rank-transfers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, whose line is over or was closed by rank 0."""
        self._thread.join(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Ends the line and waits for the thread, whether rank 0 has closed it or not."""
        self._line.end()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closed and not self._line.is_over:
                self._line.wait(_LOOK_S if self._in_flight else None)
                for message in self._line.receive():
                    self._handle(message)
                self._look()
        except BaseException:
            logger.exception("the rank's transfer thread died")
            self._failed()
        finally:
            self._close()
            self._line.close()

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, ConnectPeer):
            self._connect(message)
            return
        if isinstance(message, PostMove):
            self._post(message)
            return
        try:
            answer = self._answer(message)
        except TandemError as error:
            self._line.send(Failure(message.number, str(error)))
        else:
            self._line.send(answer)

    def _answer(
        self, message: OpenCache | ForgetPeer | SumUp | OpenWay | CloseEarlierWays | CloseCache
    ) -> CacheOpened | HeadsSummed | WayOpened | Done:
        match message:
            case OpenCache():
                return self._open(message)
            case ForgetPeer():
                remote = self._remotes.pop(message.remote, "")
                if isinstance(remote, int):
                    self._opened.disconnect(remote)
                return Done(message.number)
            case SumUp():
                summed = self._checksums.of_heads(
                    message.blocks, message.parts, message.grain, on_device=message.on_device, by_layer=message.by_layer
                )
                return HeadsSummed(message.number, summed.sums.astype("<u8").tobytes())
            case OpenWay():
                described = self._opened.reopen()
                if described is None:
                    raise InternalError("NIXL opens no second way")
                return WayOpened(message.number, described.agent_metadata)
            case CloseEarlierWays():
                return Done(message.number, self._opened.close_earlier())
            case CloseCache():
                self._close()
                return Done(message.number)

    @property
    def _opened(self) -> NixlTransport:
        if self._transport is None:
            raise InternalError("a rank's KV cache that was not opened")
        return self._transport

    def _open(self, message: OpenCache) -> CacheOpened:
        memory = self._memory
        self._transport = NixlTransport(
            NixlAgent(message.name, message.options, self._host or message.host, self._near)
        )
        return CacheOpened(
            message.number,
            shard_of(memory, self._transport.register(memory)),
            memory.num_blocks,
            memory.block_bytes,
            memory.all_heads,
            memory.all_slots,
            layout_of(memory),
        )

    def _connect(self, message: ConnectPeer) -> None:
        try:
            self._remotes[message.remote] = self._opened.connect(message.memory)
        except TransferError as error:
            self._remotes[message.remote] = str(error)

    def _post(self, message: PostMove) -> None:
        remote = self._remotes.get(message.remote, "the rank knows no such peer")
        if isinstance(remote, str):
            self._line.send(MoveOver(message.number, remote))
            return
        move = Move(
            Operation(message.operation),
            "",
            message.unit_bytes,
            np.frombuffer(message.ours, dtype="<i8").astype(np.int64),
            np.frombuffer(message.theirs, dtype="<i8").astype(np.int64),
        )
        try:
            self._in_flight[self._opened.post(remote, move)] = message.number
        except TransferError as error:
            self._line.send(MoveOver(message.number, str(error)))

    def _look(self) -> None:
        for handle, number in list(self._in_flight.items()):
            problem = ""
            try:
                if not self._opened.is_done(handle):
                    continue
            except TransferError as error:
                problem = str(error) or "it failed"
            del self._in_flight[handle]
            self._line.send(MoveOver(number, problem))

    def _close(self) -> None:
        self._closed = True
        if self._transport is not None:
            try:
                self._transport.close()
            except TransferError as error:
                logger.warning("closing the rank's KV cache: %s", error)
