"""NIXL for nodes whose ranks keep their heads, and their stage's layers, in their own memory; their peers may be any
nodes.

The protocol knows one pool, whose blocks have all heads. This transport splits each of its moves into moves between
shards (`protocol.shards`). This rank posts its own, tells the other ranks theirs (`lines`), and the move is
done when all of them are. If one of them fails, the move fails, but only when the others are over: until then they
touch memory. Where all ranks are other processes, this one has no shard and posts nothing itself.

Between two caches in one piece, `NixlTransport` alone does everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from tandem.base.errors import ConfigurationError, InternalError, TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl.ranks.lines import (
    CacheOpened,
    CloseCache,
    CloseEarlierWays,
    ConnectPeer,
    Done,
    ForgetPeer,
    HeadsSummed,
    OpenCache,
    OpenWay,
    RankLine,
    SumUp,
    WayOpened,
)
from tandem.kvtransfer.nixl.transport import NixlAgent, NixlTransport
from tandem.kvtransfer.protocol.cache_map import layout_of
from tandem.kvtransfer.protocol.shards import PoolSplit, pairs_between, part_in, shard_of, shards_in
from tandem.kvtransfer.protocol.transport import AskedSums, HandleId, Move, Operation, RemoteId, ShardSums
from tandem.wire.handoff import CacheMemory, CacheShard

_OPEN_S = 120.0  # for a rank to register its cache, which may lock all its pages
_ANSWER_S = 5.0  # longer than the node's supervisor lets a rank be silent
_CLOSE_S = 2.0

_OWN = 0  # this rank's shard, if it has one


@dataclasses.dataclass(slots=True)
class _Peer:
    """A peer's connections: our own by the peer's shard, and the numbers by which the other ranks know theirs, by
    the rank and the peer's shard."""

    split: PoolSplit
    own: dict[int, RemoteId] = dataclasses.field(default_factory=dict)
    elsewhere: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    # Ranks whose writes failed and may still be running, and the numbers of the questions that ask them to stop.
    failed: set[int] = dataclasses.field(default_factory=set)
    asked: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def take(self, rank: int) -> list[int]:
        """Removes and returns the numbers by which this rank knows the peer. Nothing else is asked of the rank then."""
        mine = [pair for pair in self.elsewhere if pair[0] == rank]
        return [self.elsewhere.pop(pair) for pair in mine]


@dataclasses.dataclass(slots=True)
class _MoveInParts:
    peer: _Peer
    writes: bool
    own: list[HandleId]
    elsewhere: list[tuple[int, int]]  # (rank, the number by which the rank knows its part)
    problem: str = ""


class ShardedTransport(NixlTransport):
    def __init__(self, agent: NixlAgent, lines: Sequence[socket.socket] = ()) -> None:
        """`lines`: one to each other rank, in rank order, if each keeps its heads apart."""
        super().__init__(agent)
        self._sockets = lines
        self._lines: dict[int, RankLine] = {}  # by rank, once the cache is registered
        self._pool: CacheMemory | None = None  # the pool of all ranks, as peers see it
        self._num_heads = self._num_slots = 0
        self._peers: dict[RemoteId, _Peer] = {}  # those with which either side is in shards
        self._moves: dict[HandleId, _MoveInParts] = {}  # handles below 0; NIXL's are above
        self._numbers = itertools.count(1)

    # ── memory ──

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        agent, first = self.agent, _OWN if memory.is_elsewhere else _OWN + 1
        self._lines = {rank: RankLine(rank, line) for rank, line in enumerate(self._sockets, start=first)}
        asked = {
            rank: line.ask(OpenCache, name=f"{agent.name}-rank{rank}", host=agent.host, options=agent.options)
            for rank, line in self._lines.items()
        }
        self._num_heads, self._num_slots = memory.all_heads, memory.all_slots
        if memory.is_elsewhere:
            self._pool = self._in_shards(memory, [], asked)
            self._is_on_device = self._pool.memory_type != "DRAM"
            return self._pool
        described = super().register(memory)
        if memory.heads is not None:
            described = self._in_shards(memory, [shard_of(memory, described)], asked)
        elif asked:
            raise InternalError("other ranks keep heads, and this one keeps all")
        self._pool = described
        return described

    def _in_shards(self, memory: KVCacheMemory, shards: list[CacheShard], asked: dict[int, int]) -> CacheMemory:
        until = time.monotonic() + _OPEN_S
        # The bytes of one head of one layer.
        each, layout = memory.block_bytes // (memory.num_kv_heads * memory.slots), layout_of(memory)
        for rank, line in self._lines.items():
            opened = line.answer(asked[rank], CacheOpened, until)
            part = part_in(opened.shard)
            theirs = (opened.num_blocks, opened.block_bytes, opened.layout)
            expected = (memory.num_blocks, each * part.heads.count * (part.width or memory.slots), layout)
            all_of = (opened.total_heads, opened.total_slots)
            if theirs != expected or all_of != (memory.all_heads, memory.all_slots):
                raise ConfigurationError(
                    f"rank {rank} keeps a KV cache of another kind than {'its node' if memory.is_elsewhere else 'rank 0'}: {theirs[0]} blocks "
                    f"of {theirs[1]} bytes, laid out {theirs[2]}, beside {memory.num_blocks} of {memory.block_bytes}, laid out {layout}"
                )
            shards.append(opened.shard)
        return CacheMemory(
            agent_metadata=b"",
            memory_type=shards[0].memory_type,
            device_id=0,
            base_address=0,
            num_blocks=memory.num_blocks,
            block_bytes=each * memory.all_heads * memory.all_slots,
            shards=shards,
        )

    # ── peers ──

    def connect(self, memory: CacheMemory) -> RemoteId:
        """Does not wait for the other ranks: if one of them cannot reach the peer, its first move fails."""
        mine = self._pool
        if mine is None:
            raise InternalError("a connection before the KV cache was registered")
        if not mine.shards and not memory.shards:
            return super().connect(memory)
        pools = shards_in(mine, self._num_heads), shards_in(memory, self._num_heads)
        peer, pairs = _Peer(PoolSplit(*pools)), pairs_between(*pools)
        try:
            for theirs in sorted({theirs for ours, theirs in pairs if ours not in self._lines}):
                peer.own[theirs] = super().connect(self._shard_of(memory, theirs))
        except TransferError:
            for connected in peer.own.values():
                super().disconnect(connected)
            raise
        for ours, theirs in pairs:
            if ours in self._lines:
                number = peer.elsewhere[ours, theirs] = next(self._numbers)
                self._lines[ours].tell(ConnectPeer(number, self._shard_of(memory, theirs)))
        remote = RemoteId(next(self._remote_ids))
        self._peers[remote] = peer
        return remote

    def _shard_of(self, memory: CacheMemory, number: int) -> CacheMemory:
        """Returns the shard as if it were a cache of its own."""
        if not memory.shards:
            return memory
        shard = memory.shards[number]
        part = part_in(shard)
        each = memory.block_bytes // (self._num_heads * self._num_slots)
        return CacheMemory(
            agent_metadata=shard.agent_metadata,
            memory_type=shard.memory_type,
            device_id=shard.device_id,
            base_address=shard.base_address,
            num_blocks=memory.num_blocks,
            block_bytes=each * part.heads.count * (part.width or self._num_slots),
        )

    def may_still_write(self, remote: RemoteId) -> bool:
        """True while a rank whose write failed has not said that it stopped. If the rank has ended, what it had sent
        may arrive at any time, and the peer must find out for itself when it is safe."""
        peer = self._peers.get(remote)
        return peer is not None and bool(peer.failed)

    def stop_writing(self, remote: RemoteId) -> None:
        """Asks each such rank to forget the peer. A rank that lives answers when it has."""
        peer = self._peers.get(remote)
        if peer is None:
            return
        for rank in sorted(peer.failed):
            line = self._lines[rank]
            if rank not in peer.asked:
                peer.asked[rank] = [line.ask(ForgetPeer, remote=number) for number in peer.take(rank)]
            line.hear()
            if all(map(line.has_answered, peer.asked[rank])):
                for number in peer.asked.pop(rank):
                    line.forget(number)
                peer.failed.discard(rank)

    def disconnect(self, remote: RemoteId) -> None:
        peer = self._peers.pop(remote, None)
        if peer is None:
            super().disconnect(remote)
            return
        for connected in peer.own.values():
            super().disconnect(connected)
        for (rank, _), number in peer.elsewhere.items():
            line = self._lines[rank]
            line.forget(line.ask(ForgetPeer, remote=number))

    # ── moves ──

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        peer = self._peers.get(remote)
        return super().post(remote, move) if peer is None else self._post_in_parts(peer, move)

    def _post_in_parts(self, peer: _Peer, move: Move) -> HandleId:
        writes = move.operation is Operation.WRITE
        parts = _MoveInParts(peer, writes, [], [])
        in_shards = peer.split.of(move)
        for part in in_shards:
            line = self._lines.get(part.ours)
            if line is not None and line.has_ended():
                raise TransferError(line.ended)
        for part in in_shards:
            if part.ours in self._lines:
                ours, theirs = (units.astype("<i8").tobytes() for units in (part.move.local, part.move.remote))
                number = self._lines[part.ours].post(
                    peer.elsewhere[part.ours, part.theirs], move.operation.value, part.move.unit_bytes, ours, theirs
                )
                parts.elsewhere.append((part.ours, number))
        try:
            for part in in_shards:
                if part.ours not in self._lines:
                    parts.own.append(super().post(peer.own[part.theirs], part.move))
        except TransferError as error:
            # The other parts are in flight. The move fails when they are over.
            parts.problem = str(error)
        handle = HandleId(-next(self._numbers))
        self._moves[handle] = parts
        return handle

    def is_done(self, handle: HandleId) -> bool:
        parts = self._moves.get(handle)
        if parts is None:
            return super().is_done(handle)
        for own in list(parts.own):
            try:
                if not super().is_done(own):
                    continue
            except TransferError as error:
                parts.problem = parts.problem or str(error)
            parts.own.remove(own)
        for rank, number in list(parts.elsewhere):
            line = self._lines[rank]
            line.hear()
            problem = line.outcome(number)
            if problem is None:
                continue
            parts.elsewhere.remove((rank, number))
            if problem:
                parts.problem = parts.problem or problem
                if parts.writes:
                    parts.peer.failed.add(rank)
        if parts.own or parts.elsewhere:
            return False
        del self._moves[handle]
        if parts.problem:
            raise TransferError(parts.problem)
        return True

    # ── checksums ──

    def sums_elsewhere(
        self, blocks: Sequence[int], parts: Sequence[int], grain: int, on_device: bool, by_layer: bool
    ) -> AskedSums:
        said = {
            "blocks": list(blocks),
            "parts": list(parts),
            "grain": grain,
            "on_device": on_device,
            "by_layer": by_layer,
        }
        asked = [(line, line.ask(SumUp, **said)) for line in self._lines.values()]
        shards = self._pool.shards if self._pool is not None else []

        def wait() -> list[ShardSums]:
            until = time.monotonic() + _ANSWER_S
            found = []
            for place, (line, number) in enumerate(asked):
                try:
                    summed = line.answer(number, HeadsSummed, until)
                except TransferError:
                    for left, unheard in asked[place + 1 :]:
                        left.forget(unheard)
                    raise
                part = part_in(shards[line.rank])
                sums = np.frombuffer(summed.sums, dtype="<u8").astype(np.uint64)
                found.append(ShardSums(part, sums.reshape(len(blocks), -1, part.heads.count)))
            return found

        def forget() -> None:
            for line, number in asked:
                line.forget(number)

        return AskedSums(wait, forget)

    # ── ways ──

    def reopen(self) -> CacheMemory | None:
        asked = {rank: line.ask(OpenWay) for rank, line in self._lines.items()}
        mine = self._pool
        has_own = _OWN not in self._lines
        described = super().reopen() if has_own else None
        if mine is None or not mine.shards:
            return described
        until = time.monotonic() + _ANSWER_S
        metadata = [described.agent_metadata] if described is not None else []
        metadata += [line.answer(asked[rank], WayOpened, until).agent_metadata for rank, line in self._lines.items()]
        shards = [
            msgspec.structs.replace(shard, agent_metadata=new) for shard, new in zip(mine.shards, metadata, strict=True)
        ]
        return msgspec.structs.replace(mine, shards=shards)

    def close_earlier(self) -> bool:
        asked = [(line, line.ask(CloseEarlierWays)) for line in self._lines.values()]
        closed = super().close_earlier()
        until = time.monotonic() + _ANSWER_S
        try:
            answers = [line.answer(number, Done, until).yes for line, number in asked]
        except TransferError:
            return False
        return closed and all(answers)

    def close(self) -> None:
        if self._closed:
            return
        asked = [(line, line.ask(CloseCache)) for line in self._lines.values()]
        try:
            super().close()
        finally:
            until = time.monotonic() + _CLOSE_S
            for line, number in asked:
                # The node's supervisor ends a rank that does not answer.
                with contextlib.suppress(TransferError):
                    line.answer(number, Done, until)
                line.close()
            for unused in self._sockets:
                unused.close()
