"""The messages between rank 0 and another rank of its node about transfers, and the line that carries them: a pair
of Unix sockets that both processes inherit, so the line ends when either process does.

Only rank 0 knows requests, peers and moves. It tells each rank which bytes of the rank's own memory go where, and the
rank says when they have moved. Rank 0 asks with a number for what it must know before it goes on, and waits for the
answer; it does not wait for moves.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import time
from typing import Any, TypeVar

import msgspec

from tandem.base.errors import TransferError
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.wire.handoff import CacheMemory, CacheShard

# ── to another rank ──


class OpenCache(msgspec.Struct, frozen=True, tag=True):
    """Make the rank's KV cache reachable. Sent once, before anything else."""

    number: int
    name: str  # of the rank's agent
    host: str
    options: NixlOptions


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Has no answer: if it fails, the rank's moves to this peer fail."""

    remote: int
    memory: CacheMemory


class ForgetPeer(msgspec.Struct, frozen=True, tag=True):
    """Answered when no move to or from the peer is in flight that could still touch memory."""

    number: int
    remote: int


class PostMove(msgspec.Struct, frozen=True, tag=True):
    """A `Move` in the rank's own pool. Answered with `MoveOver`."""

    number: int
    remote: int
    operation: str
    unit_bytes: int
    ours: bytes  # units, eight bytes each
    theirs: bytes


class SumUp(msgspec.Struct, frozen=True, tag=True):
    number: int
    blocks: list[int]
    parts: list[int]
    grain: int
    on_device: bool
    by_layer: bool


class OpenWay(msgspec.Struct, frozen=True, tag=True):
    number: int


class CloseEarlierWays(msgspec.Struct, frozen=True, tag=True):
    number: int


class CloseCache(msgspec.Struct, frozen=True, tag=True):
    """Answered when nothing moves to or from this rank's cache any more."""

    number: int


ToRank = OpenCache | ConnectPeer | ForgetPeer | PostMove | SumUp | OpenWay | CloseEarlierWays | CloseCache

# ── from another rank ──


class MoveOver(msgspec.Struct, frozen=True, tag=True):
    number: int
    problem: str = ""


class CacheOpened(msgspec.Struct, frozen=True, tag=True):
    number: int
    shard: CacheShard
    num_blocks: int
    block_bytes: int
    total_heads: int
    total_slots: int
    layout: str


class HeadsSummed(msgspec.Struct, frozen=True, tag=True):
    number: int
    # Eight bytes for each grain, for each layer of it if the sums are by layer, for each head.
    sums: bytes


class WayOpened(msgspec.Struct, frozen=True, tag=True):
    number: int
    agent_metadata: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    number: int
    yes: bool = True


class Failure(msgspec.Struct, frozen=True, tag=True):
    number: int
    problem: str


FromRank = MoveOver | CacheOpened | HeadsSummed | WayOpened | Done | Failure
Answer = CacheOpened | HeadsSummed | WayOpened | Done
A = TypeVar("A", bound=Answer)

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18
_encode = msgspec.msgpack.Encoder().encode


class MessageLine:
    """One end of a line. Neither `send` nor `receive` waits: bytes that the socket does not take go with a later
    call."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._unsent = bytearray()
        self._received = bytearray()
        self.is_over = False

    def send(self, message: msgspec.Struct) -> None:
        body = _encode(message)
        self._unsent += len(body).to_bytes(_LENGTH_BYTES, "little") + body
        self.flush()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        try:
            while self._unsent and not self.is_over:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.is_over = True

    def receive(self) -> list[Any]:
        """Returns the messages that have come. After the line's end, `is_over` is True and the last ones still come."""
        self.flush()
        try:
            while not self.is_over:
                read = self._sock.recv(_READ_BYTES)
                self.is_over = not read
                self._received += read
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True
        messages, at = [], 0
        while (begin := at + _LENGTH_BYTES) <= len(self._received):
            end = begin + int.from_bytes(self._received[at:begin], "little")
            if end > len(self._received):
                break
            messages.append(self._decoder.decode(memoryview(self._received)[begin:end].tobytes()))
            at = end
        del self._received[:at]
        return messages

    def wait(self, timeout_s: float | None) -> None:
        """Waits until something has come, the line is over, or `timeout_s` has passed. None waits without end: for a
        rank that ends with its line."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(None if timeout_s is None else max(1, int(timeout_s * 1000)))

    def end(self) -> None:
        """Ends the line. Any thread may call this; a `wait` in another thread returns and finds the line over."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_over = True
        self._sock.close()


class RankLine:
    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self._line = MessageLine(sock, FromRank)
        self._numbers = itertools.count()
        self._moves: dict[int, str | None] = {}  # outcomes by number; None: still moving
        self._asked: dict[int, Answer | Failure | None] = {}

    @property
    def is_over(self) -> bool:
        return self._line.is_over

    def has_ended(self) -> bool:
        self.hear()
        return self.is_over

    @property
    def ended(self) -> str:
        return f"rank {self.rank} of this node has ended"

    def tell(self, message: ConnectPeer) -> None:
        self._line.send(message)

    def post(self, remote: int, operation: str, unit_bytes: int, ours: bytes, theirs: bytes) -> int:
        number = next(self._numbers)
        self._moves[number] = None
        self._line.send(PostMove(number, remote, operation, unit_bytes, ours, theirs))
        return number

    def outcome(self, number: int) -> str | None:
        """Returns None while the move is under way, "" when all of it has arrived, else why it failed. The last two
        forget the move."""
        problem = self._moves[number]
        if problem is None and self.is_over:
            problem = self.ended
        if problem is not None:
            del self._moves[number]
        return problem

    def ask(self, kind: type[Any], **said: Any) -> int:
        number = next(self._numbers)
        self._asked[number] = None
        self._line.send(kind(number=number, **said))
        return number

    def has_answered(self, number: int) -> bool:
        return isinstance(self._asked[number], Done)

    def forget(self, number: int) -> None:
        """Nothing will wait for the answer to this question."""
        del self._asked[number]

    def answer(self, number: int, kind: type[A], until: float) -> A:
        """Waits for the answer, until `until`; this thread does nothing else meanwhile. Raises TransferError if none
        comes, or one of another kind."""
        try:
            while (answer := self._asked[number]) is None:
                self.hear()
                left = until - time.monotonic()
                if self._asked[number] is not None:
                    continue
                if self.is_over:
                    raise TransferError(self.ended)
                if left <= 0:
                    raise TransferError(f"rank {self.rank} of this node does not answer")
                self._line.wait(left)
        finally:
            del self._asked[number]
        if isinstance(answer, Failure):
            raise TransferError(f"rank {self.rank}: {answer.problem}")
        if not isinstance(answer, kind):
            raise TransferError(f"rank {self.rank} answered with {type(answer).__name__}")
        return answer

    def hear(self) -> None:
        for message in self._line.receive():
            if isinstance(message, MoveOver):
                if message.number in self._moves:
                    self._moves[message.number] = message.problem
            elif message.number in self._asked:  # else the answer came too late
                self._asked[message.number] = message

    def close(self) -> None:
        self._line.close()
