"""The two ends of a pair: the caller posts moves, the callee carries out its part of them.

    caller                                     callee
      │ ── Open ───────────────────────────────▶ │   both make their member of the group
      │ ── Announce(write, units) ─────────────▶ │   posts the receive
      │ ═ the units, side by side ═════════════▶ │   copies them into its cache, if they are still expected
      │ ◀───────────────────────────────Landed ─ │
      │ ── Announce(read, units) ──────────────▶ │
      │ ◀═════════════ the units, side by side ═ │

Each end is one thread, which sleeps while there is nothing to do. Every wait has a deadline, and what breaks takes the
pair down: its moves fail, and the next transfer with this peer makes another.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from kvtransfer.nccl.gate import Gate
from kvtransfer.nccl.group import Group, StoreServer, join_store
from kvtransfer.nccl.messages import Announce, Landed, Leave, Open, Rendezvous
from kvtransfer.nccl.options import NcclOptions
from kvtransfer.nccl.pool import Pool, Staging
from kvtransfer.protocol.transport import HandleId, Move, Operation
from wire.errors import TransferError

logger = logging.getLogger(__name__)

ABORT_S = 2.0


class Node(msgspec.Struct, frozen=True):
    """What every pair of this process shares."""

    name: str
    host: str
    backend: str
    options: NcclOptions
    pool: Pool
    gate: Gate
    send: Callable[[str, msgspec.Struct], None]  # raises TransferError


class End:
    """What both ends have: a group that can be taken away from the thread that works with it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._closed = threading.Event()
        self._working = threading.Lock()  # held while the thread touches the cache or the group
        self._group: Group | None = None

    def _use(self, group: Group | None) -> None:
        with self._working:
            if self._closed.is_set():
                raise TransferError("the pair is being taken down")
            self._group = group

    def stop(self) -> None:
        """When this returns, nothing of this pair touches the cache any more."""
        self._closed.set()
        group = self._group
        if group is not None and not self._working.acquire(blocking=False):
            group.abort()
            if not self._working.acquire(timeout=ABORT_S):
                logger.error("a group of %s did not end within %g s", self.node.name, ABORT_S)
                return
        elif group is None:
            return
        self._group = None
        self._working.release()


class Caller(End):
    """`number`s of moves are the transport's handles. It ends when nothing has moved for a while; whoever has
    something to move then needs another."""

    def __init__(self, node: Node, peer: Rendezvous, reply_to: str) -> None:
        super().__init__(node)
        self.pair_id = secrets.token_hex(16)
        self.peer = peer
        self._reply_to = reply_to
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[HandleId, Move] | None] = queue.SimpleQueue()
        # When a move that has been sent must have landed; None while it is still to be carried out.
        self._open: dict[HandleId, float | None] = {}
        self._broken: str | None = None
        self._idle = False
        self._thread = threading.Thread(target=self._run, name=f"{node.name}-pair", daemon=True)

    # ── the transport's thread ──

    def start(self) -> None:
        self._thread.start()

    def post(self, number: HandleId, move: Move) -> bool:
        """False: it has ended for want of work."""
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

    def close(self) -> None:
        self._break("the connection has been closed")
        self._queue.put(None)
        self.stop()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
            timeout_s = node.options.connect_timeout_s
            store = StoreServer(node.host, timeout_s)
            self._tell(Open(self.pair_id, self.peer.key, node.name, self._reply_to, store.host, store.port))
            self._use(Group(node.backend, store.store, 0, node.host, timeout_s))
            staging = Staging(node.pool.device)
            while self._serve_next(staging):
                pass
            self._tell(Leave(self.pair_id))
        except TransferError as error:
            self._break(str(error))
        except BaseException as error:
            logger.exception("%s: a pair's thread died", node.name)
            self._break(f"a bug in the pair's thread: {error}")
        finally:
            with self._working:
                self._group = None

    def _tell(self, message: msgspec.Struct) -> None:
        self.node.send(self.peer.endpoint, message)

    def _serve_next(self, staging: Staging) -> bool:
        """False: the pair is no longer needed."""
        try:
            item = self._queue.get(timeout=self.node.options.idle_s)
        except queue.Empty:
            with self._lock:
                self._idle = self._queue.empty() and not self._open
                return not self._idle
        if item is None:
            return False
        with self._working:
            group = self._group
            if self._closed.is_set() or group is None:
                return False
            self._carry_out(group, *item, staging)
        return True

    def _carry_out(self, group: Group, number: HandleId, move: Move, staging: Staging) -> None:
        node, timeout_s = self.node, self.node.options.move_timeout_s
        units = move.remote.tolist()
        self._tell(Announce(self.pair_id, number, move.operation, move.transfer_id, move.unit_bytes, units))
        with staging.stream():
            room = staging.room(move.num_bytes)
            if move.operation is Operation.WRITE:
                group.send(node.pool.gather(move.unit_bytes, move.local, room), timeout_s)
                with self._lock:
                    if number in self._open:
                        self._open[number] = time.monotonic() + timeout_s
            else:
                group.receive(room, timeout_s)
                node.pool.scatter(move.unit_bytes, move.local, room)
                staging.finish()
                with self._lock:
                    self._open.pop(number, None)


class Callee(End):
    def __init__(self, node: Node, opened: Open, ended: Callable[[str], None]) -> None:
        super().__init__(node)
        self.pair_id = opened.pair_id
        self.caller = opened.caller
        self._opened = opened
        self._ended = ended
        self._queue: queue.SimpleQueue[Announce | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{node.name}-pair", daemon=True)
        self._thread.start()

    def announce(self, message: Announce) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)
        self.stop()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        node, opened = self.node, self._opened
        try:
            timeout_s = node.options.connect_timeout_s
            store = join_store(opened.store_host, opened.store_port, timeout_s)
            self._use(Group(node.backend, store, 1, node.host, timeout_s))
            staging = Staging(node.pool.device)
            while True:
                # The caller takes an idle pair down; one that is not heard of for longer has died.
                message = self._queue.get(timeout=2 * node.options.idle_s)
                if message is None or not self._serve(message, staging):
                    break
        except queue.Empty:
            logger.info("%s: %s has not been heard of for long", node.name, opened.caller)
        except TransferError as error:
            if not self._closed.is_set():
                logger.warning("%s: the pair with %s broke: %s", node.name, opened.caller, error)
        except BaseException:
            logger.exception("%s: a pair's thread died", node.name)
        finally:
            with self._working:
                self._group = None
            self._ended(self.pair_id)

    def _serve(self, message: Announce, staging: Staging) -> bool:
        node = self.node
        problem = node.pool.problem(message.unit_bytes, message.units)
        with self._working:
            group = self._group
            if self._closed.is_set() or group is None:
                return False
            try:
                if problem is None:
                    problem = self._carry_out(group, message, staging)
            except TransferError as error:
                problem = str(error)
                raise
            finally:
                if message.operation is Operation.WRITE:
                    node.send(self._opened.reply_to, Landed(self.pair_id, message.number, problem or ""))
        # What was refused has been received all the same, but units that do not exist have not: nothing that comes
        # after them would be understood.
        return problem is None

    def _carry_out(self, group: Group, message: Announce, staging: Staging) -> str | None:
        node, timeout_s = self.node, self.node.options.move_timeout_s
        units = np.asarray(message.units, dtype=np.int64)
        with staging.stream():
            room = staging.room(message.unit_bytes * len(units))
            if message.operation is Operation.READ:
                group.send(node.pool.gather(message.unit_bytes, units, room), timeout_s)
                return None
            group.receive(room, timeout_s)
            blocks = node.pool.blocks_of(message.unit_bytes, message.units)
            with node.gate.landing(message.transfer_id, blocks) as allowed:
                if not allowed:
                    return "it is not expected here any more"
                node.pool.scatter(message.unit_bytes, units, room)
                staging.finish()
        return None
