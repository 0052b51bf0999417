"""Tiers of a node whose ranks keep their KV in their own memory: each rank stores and loads its own part of the same
blocks.

Rank 0 says what is kept where, as on a node of one rank: it has the tier's manager, and a place has the same number
on all ranks. The other ranks have a pool, or a file, with as many slots, each as large as their part of a chunk.
Rank 0 tells them each copy over a line (`RankTiers`). A copy has ended when it has at every rank, and is right if it
is right at every rank. Each rank gives up what is not done in its time, so every copy ends. When one rank has given a
copy up, rank 0 leaves the tier out for a while.

All ranks have computed what a copy reads when rank 0 has computed it, because rank 0's forward pass ends with the
others' results. On a device that is when an event on rank 0's stream has happened, so the others are told of a store
only then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError, InternalError, TandemError
from tandem.kvtransfer.base import ConnectorContext
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.memory import KVCacheMemory, fence_after
from tandem.kvtransfer.offload.cpu import STOP_GRACE_S
from tandem.kvtransfer.offload.disk import HEADER_BYTES, DiskTier
from tandem.kvtransfer.offload.manager import TierManager
from tandem.kvtransfer.offload.spec import Copy, LastingSpec, Mover, Tier, create_tier
from tandem.kvtransfer.sources import TierSources

logger = logging.getLogger(__name__)

_OPEN_S = 120.0  # a disk may be slow to make room
_LOOK_S = 0.001  # between two looks at running copies, or at an event that has not happened


class TellBlock(msgspec.Struct, frozen=True, tag=True):
    """Asks how many bytes the rank's part of a block has."""


class OpenTier(msgspec.Struct, frozen=True, tag=True):
    """Opens the next tier, of the rank's own size. `generation`: of rank 0's file; the rank's file takes the same."""

    config: TierConfig
    generation: int


class MakeCopies(msgspec.Struct, frozen=True, tag=True):
    tier: int
    stores: list[Copy]
    loads: list[Copy]


class BlockSize(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int


class TierOpened(msgspec.Struct, frozen=True, tag=True):
    problem: str = ""
    left_out: str = ""  # why it cannot be used now


class CopiesEnded(msgspec.Struct, frozen=True, tag=True):
    tier: int
    right: dict[int, bool | None]  # by the job's number: see Mover.take_ended


ToRank = TellBlock | OpenTier | MakeCopies
FromRank = BlockSize | TierOpened | CopiesEnded


class TierLines:
    """Rank 0's ends of the lines to the other ranks. The thread that loads the model opens the tiers. After that a
    thread of this class has the lines."""

    def __init__(self, sockets: Sequence[socket.socket], wake: Callable[[], None]) -> None:
        # Imported here, because its package loads everything that moves blocks between nodes.
        from tandem.kvtransfer.nixl.ranks.lines import MessageLine

        self._sockets = list(sockets)
        self._lines = [MessageLine(sock, FromRank) for sock in sockets]
        self._wake = wake
        self._changed = threading.Lock()  # guards the fields from here on
        self._unsent: deque[tuple[Any, MakeCopies]] = deque()
        self._missing: dict[tuple[int, int], int] = {}  # by tier and job: at how many ranks it has not ended
        self._right: dict[tuple[int, int], bool | None] = {}  # what the ranks that have ended it say together
        self._ended: dict[int, dict[int, bool | None]] = {}
        self._problem = ""
        self._died = False
        self._closing = False
        self._stirred = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kv-tiers-of-ranks", daemon=True)
        self._tiers = 0
        self._open = 0

    @property
    def ranks(self) -> int:
        """The number of ranks, rank 0 included."""
        return len(self._lines) + 1

    def block_bytes(self) -> list[int]:
        """Returns the bytes of a block on each of the other ranks."""
        return [answer.num_bytes for answer in self._ask([TellBlock()] * len(self._lines), BlockSize)]

    def open(self, configs: Sequence[TierConfig], generation: int) -> tuple[int, str]:
        """Opens the same tier at each of the other ranks. Returns its number, and why a rank cannot use it now ("": all can).
        Raises ConfigurationError."""
        answers = self._ask([OpenTier(config, generation) for config in configs], TierOpened)
        for answer in answers:
            if answer.problem:
                raise ConfigurationError(answer.problem)
        self._tiers += 1
        reasons = (f"rank {rank}: {answer.left_out}" for rank, answer in enumerate(answers, start=1) if answer.left_out)
        return self._tiers - 1, next(reasons, "")

    def keep(self) -> None:
        """One more tier must call `close` before the lines are closed."""
        self._open += 1

    def _ask(self, questions: Sequence[ToRank], kind: type[Any]) -> list[Any]:
        if self._thread.ident is not None:
            raise InternalError("a tier is opened while others copy")
        answers = []
        for line, question in zip(self._lines, questions, strict=True):
            line.send(question)
        until = time.monotonic() + _OPEN_S
        for rank, line in enumerate(self._lines, start=1):
            while not (received := line.receive()):
                left = until - time.monotonic()
                if line.is_over or left <= 0:
                    raise InternalError(f"rank {rank} of this node does not open its part of a tier")
                line.wait(left)
            if len(received) != 1 or not isinstance(received[0], kind):
                raise InternalError(f"rank {rank} answered with {received}")
            answers.append(received[0])
        return answers

    def post(self, copies: MakeCopies, fence: Any) -> None:
        """Never waits. `fence`: an event that must have happened before the other ranks may store."""
        if self._died:
            raise InternalError(self._problem)
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            for job in (*copies.stores, *copies.loads):
                self._missing[copies.tier, job.job] = len(self._lines)
            # Two messages, so that a load does not wait for the stores' event.
            self._unsent += [(None, MakeCopies(copies.tier, [], copies.loads))] if copies.loads else []
            self._unsent += [(fence, MakeCopies(copies.tier, copies.stores, []))] if copies.stores else []
        os.eventfd_write(self._stirred, 1)

    def take_ended(self, tier: int) -> dict[int, bool | None]:
        if self._died:
            raise InternalError(self._problem)
        if tier not in self._ended:  # read without the lock: a copy that ends now is taken the next time
            return {}
        with self._changed:
            return self._ended.pop(tier)

    def close(self) -> None:
        """Closes the lines with the last tier."""
        self._open -= 1
        if self._open > 0 or self._closing:
            return
        with self._changed:
            self._closing = True
        if self._thread.ident is None:
            self._end()
        else:
            os.eventfd_write(self._stirred, 1)
            self._thread.join(STOP_GRACE_S)
        if not self._thread.is_alive():
            os.close(self._stirred)  # here, because `post` may still use it when the thread has died

    def _run(self) -> None:
        try:
            while not self._closing:
                waits = self._send()
                self._sleep(_LOOK_S if waits else None)
                self._hear()
        except BaseException as error:
            logger.exception("the thread that has ranks copy to tiers died")
            self._died = True
            self._fail(f"the thread that has ranks copy to tiers died: {error!r}")
        finally:
            self._end()

    def _send(self) -> bool:
        """Sends the copies that may be sent. True: others wait for their event."""
        with self._changed:
            waiting = deque(self._unsent)
            self._unsent.clear()
        held: deque[tuple[Any, MakeCopies]] = deque()
        while waiting:
            fence, copies = waiting.popleft()
            if fence is not None and not fence.query():
                held.append((fence, copies))
                continue
            for line in self._lines:
                line.send(copies)
        with self._changed:
            self._unsent.extendleft(reversed(held))
        return bool(held)

    def _sleep(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._stirred, select.POLLIN)
        for sock, line in zip(self._sockets, self._lines, strict=True):
            if not line.is_over:
                poll.register(sock, select.POLLIN | (select.POLLOUT if line.has_unsent else 0))
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._stirred)

    def _hear(self) -> None:
        for rank, line in enumerate(self._lines, start=1):
            for message in line.receive():
                if isinstance(message, CopiesEnded):
                    self._book(message)
            if line.is_over:
                self._fail(f"rank {rank} of this node has ended, and with it its part of what tiers keep")

    def _book(self, message: CopiesEnded) -> None:
        tier = message.tier
        with self._changed:
            for job, right in message.right.items():
                self._missing[tier, job] -= 1
                together = both(self._right.pop((tier, job), True), right)
                if self._missing[tier, job]:
                    self._right[tier, job] = together
                else:
                    del self._missing[tier, job]
                    self._ended.setdefault(tier, {})[job] = together
        self._wake()

    def _fail(self, why: str) -> None:
        """Copies that have not ended never will. The node ends, as it does when any of its ranks ends."""
        with self._changed:
            if self._problem:
                return
            self._problem = why
        self._wake()

    def _end(self) -> None:
        for line in self._lines:
            line.close()


class RanksMover(Mover):
    """Makes rank 0's own copies, and has the other ranks make the same ones."""

    block_bytes = 0

    def __init__(self, own: Mover, lines: TierLines, tier: int, memory: KVCacheMemory, all_bytes: int) -> None:
        self._own, self._lines, self._tier = own, lines, tier
        self._memory = memory
        self.block_bytes = all_bytes  # of a block on all ranks together
        # Jobs that have ended at rank 0, or at all other ranks, but not at both.
        self._here: dict[int, bool | None] = {}
        self._there: dict[int, bool | None] = {}
        self._closed = False

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        self._own.submit(stores, loads)
        fence = fence_after(self._memory.tensor) if stores else None
        self._lines.post(MakeCopies(self._tier, list(stores), list(loads)), fence)

    def take_ended(self) -> dict[int, bool | None]:
        self._here |= self._own.take_ended()
        self._there |= self._lines.take_ended(self._tier)
        ended = {job: both(self._here.pop(job), self._there.pop(job)) for job in self._here.keys() & self._there.keys()}
        if None in ended.values() and not self._own.left_out:
            self._own.leave_out("another rank's part did not answer in time")
        return ended

    @property
    def left_out(self) -> str:
        return self._own.left_out

    @property
    def given_up(self) -> int:
        return self._own.given_up

    @property
    def stored_bytes(self) -> int:
        return self._own.stored_bytes // self._memory.block_bytes * self.block_bytes

    @property
    def loaded_bytes(self) -> int:
        return self._own.loaded_bytes // self._memory.block_bytes * self.block_bytes

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._lines.close()
            self._own.close()


class TierOfRanks(LastingSpec):
    """The spec of such a tier. It divides the tier's bytes by what a block takes at each rank, so that all have as many
    slots."""

    def __init__(self, config: TierConfig, lines: TierLines) -> None:
        if config.kind not in ("cpu", "disk"):
            raise ConfigurationError(
                f"cache.tiers: {config.kind} knows the KV of one rank, and this node's ranks keep theirs apart: take cpu or disk"
            )
        self.name = config.kind
        self._config = config
        self._lines = lines
        self.recall = TierSources()

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        sizes = [memory.block_bytes, *self._lines.block_bytes()]
        own, *others = _of_ranks(self._config, sizes)
        spec = create_tier(own).spec
        if isinstance(spec, DiskTier):
            spec.recall = self.recall
        manager, mover = spec.open(memory, wake)
        generation = spec.generation if isinstance(spec, DiskTier) else 0
        why = f"rank 0: {mover.left_out}"
        try:
            if generation is not None:
                tier, why = self._lines.open(others, generation)
        except TandemError:
            mover.close()
            raise
        self._lines.keep()
        if not why:
            return manager, RanksMover(mover, self._lines, tier, memory, sum(sizes))
        logger.error("cache.tiers: %s: until it is started again, the node serves without this tier", why)
        return manager, AbsentMover(why, mover, self._lines, memory, sum(sizes))


class AbsentMover(RanksMover):
    """Of a tier that could not be opened at every rank. It is left out until the node is started again, because the ranks
    do not know whether they have the same. Rank 0's part still forgets what the next start must not find."""

    left_out = ""

    def __init__(self, why: str, own: Mover, lines: TierLines, memory: KVCacheMemory, all_bytes: int) -> None:
        super().__init__(own, lines, 0, memory, all_bytes)
        self.left_out = why

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        self._here |= {job.job: None for job in (*stores, *loads)}

    def take_ended(self) -> dict[int, bool | None]:
        ended, self._here = self._here, {}
        return ended


def both(one: bool | None, other: bool | None) -> bool | None:
    """What two ranks together say of a copy: wrong if either is, given up if either is, else right."""
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def tiers_of(context: ConnectorContext) -> list[Tier]:
    if context.remote or context.mirror:
        raise ConfigurationError(
            "cache.remote and cache.mirror copy rank 0's part of a tier, and this node's ranks keep theirs apart: leave them out"
        )
    lines = TierLines(context.tier_lines, context.wake)
    return [Tier(TierOfRanks(config, lines), config.block_factor) for config in context.tiers]


def _of_ranks(config: TierConfig, sizes: Sequence[int]) -> list[TierConfig]:
    """Returns each rank's tier, all with as many slots. On a disk each has its own folder, because no rank's file fits
    another rank."""
    beside = HEADER_BYTES if config.disk else 0
    chunks = [beside + size * config.block_factor for size in sizes]
    asked = config.cpu or config.size or 0
    slots = asked // sum(chunks)
    if slots < 1:
        raise ConfigurationError(
            f"cache.tiers: {asked} bytes of {config.kind} have no room for {config.block_factor} of this model's blocks, which are "
            f"{sum(sizes)} bytes each on all ranks"
        )
    if not config.disk:
        return [msgspec.structs.replace(config, cpu=slots * chunk) for chunk in chunks]
    return [
        msgspec.structs.replace(config, disk=str(Path(config.disk) / f"rank{rank}of{len(sizes)}"), size=slots * chunk)
        for rank, chunk in enumerate(chunks)
    ]


class RankTiers:
    """Another rank's part: a thread that has the rank's copies made, as rank 0 says. It ends with its line. `failed`
    is called from the thread when a bug ends it: rank 0 then gets no answers, so the process must end."""

    def __init__(self, sock: socket.socket, memory: KVCacheMemory, failed: Callable[[], None]) -> None:
        from tandem.kvtransfer.nixl.ranks.lines import MessageLine

        self._line = MessageLine(sock, ToRank)
        self._memory = memory
        self._failed = failed
        self._tiers: list[Tier] = []
        self._resets: list[int] = []  # by tier: how often it has forgotten everything
        self._under_way = 0
        self._thread = threading.Thread(target=self._run, name="rank-tiers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._line.end()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._line.is_over:
                self._line.wait(_LOOK_S if self._under_way else None)
                for message in self._line.receive():
                    self._handle(message)
                self._look()
        except BaseException:
            logger.exception("the rank's thread that copies to tiers died")
            self._failed()
        finally:
            for tier in self._tiers:
                tier.close()
            self._line.close()

    def _handle(self, message: ToRank) -> None:
        match message:
            case TellBlock():
                self._line.send(BlockSize(self._memory.block_bytes))
            case OpenTier():
                self._line.send(self._opened(message))
            case MakeCopies():
                tier = self._tiers[message.tier]
                latest = max(job.resets for job in (*message.stores, *message.loads))
                while self._resets[message.tier] < latest:
                    tier.manager.reset()
                    self._resets[message.tier] += 1
                self._under_way += len(message.stores) + len(message.loads)
                tier.mover.submit(message.stores, message.loads)

    def _opened(self, message: OpenTier) -> TierOpened:
        try:
            tier = create_tier(message.config)
            if isinstance(tier.spec, DiskTier):
                tier.spec.follow(message.generation)
            tier.open(self._memory, lambda: None)
        except TandemError as error:
            return TierOpened(str(error))
        self._tiers.append(tier)
        self._resets.append(0)
        return TierOpened(left_out=tier.mover.left_out)

    def _look(self) -> None:
        for number, tier in enumerate(self._tiers):
            if ended := tier.mover.take_ended():
                self._under_way -= len(ended)
                self._line.send(CopiesEnded(number, ended))
