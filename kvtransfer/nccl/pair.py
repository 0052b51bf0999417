"""The two ends of a pair: the caller posts moves, the callee carries out its part of them.

    caller                                     callee
      │ ── Open ───────────────────────────────▶ │   each makes its member of the group
      │ ── Announce(write, units) ─────────────▶ │   posts the receive
      │ ═ the units, side by side ═════════════▶ │   copies them into its cache, if it still expects them
      │ ◀───────────────────────────────Landed ─ │   so also if it dropped them
      │ ── Announce(read, units) ──────────────▶ │
      │ ◀═════════════ the units, side by side ═ │

Each end is one thread, which sleeps while there is nothing to do. Every wait has a deadline. An error takes the pair
down: its moves fail, and the next transfer with this peer makes a new pair.

A write whose transfer has ended at the callee, because its request was aborted, is no error, or one client's abort would
cost all others their transfers. Its bytes have been received like all others, so both ends agree on what comes next. They
are dropped, and the caller counts the write as done: it needs its own blocks for it no longer, and the callee takes no
further word about that transfer, so the blocks cannot be taken for written.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from tandem.base.errors import TransferError
from tandem.kvtransfer.nccl.group import Group, StoreServer, join_store
from tandem.kvtransfer.nccl.options import NcclOptions
from tandem.kvtransfer.nccl.pool import BlockGate, CacheUnits, StagingBuffer, WriteVerdict
from tandem.kvtransfer.protocol.transport import HandleId, Move, Operation

logger = logging.getLogger(__name__)


class Rendezvous(msgspec.Struct, frozen=True):
    """How to reach a node. Its peers get this as CacheMemory.agent_metadata. `key` proves that a caller has got it."""

    endpoint: str
    key: bytes
    backend: str


class Open(msgspec.Struct, frozen=True, tag="open"):
    """To the callee: the caller waits at this store for the other member of its group."""

    pair_id: str
    key: bytes
    caller: str
    reply_to: str
    store_host: str
    store_port: int


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """To the callee. Write: these units of yours come next. Read: send these units of yours."""

    pair_id: str
    number: int
    operation: Operation
    transfer_id: str
    unit_bytes: int
    units: list[int]


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """To the caller: a write is over, in the callee's cache or dropped with its transfer. `problem`: why the pair breaks."""

    pair_id: str
    number: int
    problem: str = ""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """To the callee: the caller has taken its end down."""

    pair_id: str


PairMessage = Open | Announce | Landed | Leave


class PairContext(msgspec.Struct, frozen=True):
    """What every pair of this process shares."""

    name: str
    host: str
    backend: str
    options: NcclOptions
    pool: CacheUnits
    gate: BlockGate
    send: Callable[[str, msgspec.Struct], None]  # raises TransferError


class PairEnd(abc.ABC):
    """The common part of both ends: a thread, which another thread can shut out of the cache at any moment."""

    def __init__(self, node: PairContext) -> None:
        self.node = node
        self._closed = threading.Event()
        # The thread holds it while it touches the cache: for milliseconds, and never while it waits for the peer.
        self._touching = threading.Lock()
        self._group: Group | None = None
        self._thread = threading.Thread(target=self._run, name=f"{node.name}-pair", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """When this returns, the pair touches the cache no more. Its thread ends by itself: at once, or, if it is
        making its group, when that has succeeded or failed."""
        self._closed.set()
        with self._touching:
            group = self._group
        if group is not None:
            group.abort()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ── its own thread ──

    @abc.abstractmethod
    def _run(self) -> None: ...

    def _make_group(self, store: TCPStore, rank: int) -> Group:
        node = self.node
        group = Group(node.backend, store, rank, node.host, node.options.connect_timeout_s)
        with self._cache():
            self._group = group
        return group

    @contextlib.contextmanager
    def _cache(self) -> Iterator[CacheUnits]:
        """While the context is open, the thread may touch the cache. Raises TransferError after `stop`."""
        with self._touching:
            if self._closed.is_set():
                raise TransferError("the pair is being taken down")
            yield self.node.pool


class PairCaller(PairEnd):
    """The end that posts moves. Their `number`s are the transport's handles. It ends when nothing has moved for
    `idle_s`; the next move then makes a new one."""

    def __init__(self, node: PairContext, peer: Rendezvous, reply_to: str) -> None:
        super().__init__(node)
        self.pair_id = secrets.token_hex(16)
        self.peer = peer
        self._reply_to = reply_to
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[HandleId, Move] | None] = queue.SimpleQueue()
        # By when a begun write must be in the peer's cache; None for moves that can be taken back: reads, and moves
        # that have not begun.
        self._open: dict[HandleId, float | None] = {}
        self._broken: str | None = None
        self._idle = False

    # ── the transport's thread ──

    def post(self, number: HandleId, move: Move) -> bool:
        """False: the pair has ended because it was idle. Raises TransferError if it is broken."""
        with self._lock:
            if self._broken is not None:
                raise TransferError(self._broken)
            if self._idle:
                return False
            self._open[number] = None
            self._queue.put((number, move))
            return True

    def is_done(self, number: HandleId) -> bool:
        with self._lock:
            if number not in self._open:
                return True
            deadline = self._open[number]
            if self._broken is None and deadline is not None and time.monotonic() > deadline:
                self._broken = f"a write did not land within {self.node.options.move_timeout_s:g} s"
            if self._broken is not None:
                del self._open[number]
                raise TransferError(self._broken)
            return False

    def cancel(self, number: HandleId) -> bool:
        """Returns whether the move is over with this. A begun write is not: the peer may be copying it."""
        with self._touching, self._lock:
            if self._open.get(number) is not None:
                return False
            self._open.pop(number, None)
            return True

    def close(self) -> None:
        self._break("the connection has been closed")
        self._queue.put(None)
        self.stop()

    # ── the inbox's thread ──

    def landed(self, message: Landed) -> None:
        if message.problem:
            self._break(f"the peer could not take a write: {message.problem}")
        else:
            with self._lock:
                self._open.pop(HandleId(message.number), None)

    # ── its own thread ──

    def _break(self, reason: str) -> None:
        with self._lock:
            self._broken = self._broken or reason

    def _run(self) -> None:
        node = self.node
        try:
            store = StoreServer(node.host, node.options.connect_timeout_s)
            self._tell(Open(self.pair_id, self.peer.key, node.name, self._reply_to, store.host, store.port))
            group = self._make_group(store.store, 0)
            staging = StagingBuffer(node.pool.device)
            while self._serve_next(group, staging):
                pass
            self._tell(Leave(self.pair_id))
        except TransferError as error:
            self._break(str(error))
        except BaseException as error:
            logger.exception("%s: a pair's thread died", node.name)
            self._break(f"a bug in the pair's thread: {error}")
        finally:
            self._group = None

    def _tell(self, message: msgspec.Struct) -> None:
        self.node.send(self.peer.endpoint, message)

    def _serve_next(self, group: Group, staging: StagingBuffer) -> bool:
        """Carries out the next move. False: the pair is no longer needed."""
        try:
            item = self._queue.get(timeout=self.node.options.idle_s)
        except queue.Empty:
            with self._lock:
                self._idle = self._queue.empty() and not self._open
                return not self._idle
        if item is None or self._closed.is_set():
            return False
        number, move = item
        with staging.stream():
            room = staging.room(move.num_bytes)
            if move.operation is Operation.WRITE:
                self._write(group, number, move, staging, room)
            else:
                self._read(group, number, move, staging, room)
        return True

    def _write(self, group: Group, number: HandleId, move: Move, staging: StagingBuffer, room: torch.Tensor) -> None:
        timeout_s = self.node.options.move_timeout_s
        with self._cache() as pool:
            if not self._set_deadline(number, math.inf):
                return
            data = pool.gather(move.unit_bytes, move.local, room)
            staging.finish()
        self._announce(number, move)
        group.send(data, timeout_s)
        self._set_deadline(number, time.monotonic() + timeout_s)

    def _read(self, group: Group, number: HandleId, move: Move, staging: StagingBuffer, room: torch.Tensor) -> None:
        if not self._is_wanted(number):
            return
        self._announce(number, move)
        group.receive(room, self.node.options.move_timeout_s)
        with self._cache() as pool:
            if not self._is_wanted(number):
                return
            pool.scatter(move.unit_bytes, move.local, room)
            staging.finish()
            with self._lock:
                self._open.pop(number, None)

    def _announce(self, number: HandleId, move: Move) -> None:
        units = move.remote.tolist()
        self._tell(Announce(self.pair_id, number, move.operation, move.transfer_id, move.unit_bytes, units))

    def _is_wanted(self, number: HandleId) -> bool:
        with self._lock:
            return number in self._open

    def _set_deadline(self, number: HandleId, deadline: float) -> bool:
        """False: the move is no longer wanted, or has already ended."""
        with self._lock:
            if number not in self._open:
                return False
            self._open[number] = deadline
            return True


class PairCallee(PairEnd):
    def __init__(self, node: PairContext, opened: Open, ended: Callable[[str], None]) -> None:
        super().__init__(node)
        self.pair_id = opened.pair_id
        self.caller = opened.caller
        self._opened = opened
        self._ended = ended
        self._queue: queue.SimpleQueue[Announce | None] = queue.SimpleQueue()

    def announce(self, message: Announce) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)
        self.stop()

    # ── its own thread ──

    def _run(self) -> None:
        node, opened = self.node, self._opened
        try:
            store = join_store(opened.store_host, opened.store_port, node.options.connect_timeout_s)
            group = self._make_group(store, 1)
            staging = StagingBuffer(node.pool.device)
            while True:
                # The caller takes an idle pair down. If it sends nothing for longer than that, it has died.
                message = self._queue.get(timeout=2 * node.options.idle_s)
                if message is None or self._closed.is_set() or not self._serve(group, message, staging):
                    break
        except queue.Empty:
            logger.info("%s: %s has not been heard of for long", node.name, opened.caller)
        except TransferError as error:
            if not self._closed.is_set():
                # As text: a handler that keeps the record would keep the error's frames, and so the group's sockets.
                logger.warning("%s: the pair with %s broke: %s", node.name, opened.caller, str(error))
        except BaseException:
            logger.exception("%s: a pair's thread died", node.name)
        finally:
            self._group = None
            self._ended(self.pair_id)

    def _serve(self, group: Group, message: Announce, staging: StagingBuffer) -> bool:
        node = self.node
        problem = node.pool.problem(message.unit_bytes, message.units)
        try:
            if problem is None:
                problem = self._carry_out(group, message, staging)
        except BaseException as error:
            problem = str(error) or type(error).__name__
            raise
        finally:
            if message.operation is Operation.WRITE:
                node.send(self._opened.reply_to, Landed(self.pair_id, message.number, problem or ""))
        # A problem ends the pair at both ends. If the units do not exist, their bytes were not received, so nothing
        # after them could be understood.
        return problem is None

    def _carry_out(self, group: Group, message: Announce, staging: StagingBuffer) -> str | None:
        timeout_s = self.node.options.move_timeout_s
        units = np.asarray(message.units, dtype=np.int64)
        with staging.stream():
            room = staging.room(message.unit_bytes * len(units))
            if message.operation is Operation.READ:
                with self._cache() as pool:
                    data = pool.gather(message.unit_bytes, units, room)
                    staging.finish()
                group.send(data, timeout_s)
                return None
            group.receive(room, timeout_s)
            with self._cache() as pool:
                blocks = pool.blocks_of(message.unit_bytes, message.units)
                with self.node.gate.landing(message.transfer_id, blocks) as landing:
                    if landing is WriteVerdict.FOREIGN:
                        return "these blocks are not its transfer's"
                    if landing is WriteVerdict.COPIED:
                        pool.scatter(message.unit_bytes, units, room)
                        staging.finish()
        return None
