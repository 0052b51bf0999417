"""`benchmarks.transfer --ranks`: nodes whose ranks each have their heads in memory of their own and an agent in a process of their own, compared
with NIXL alone between the same pairs of processes.

Blocks are shaped like Llama 3.2 1B's: 16 layers, 8 KV heads of 64, 16 tokens, bf16: 512 KiB with all heads.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.lib.processes import Remote
from benchmarks.transfer_nodes import BLOCK_SIZE, HEAD_DIM, CacheShape, TransferNode, TransferPair, blocks_of
from tandem.engine.model.shard import heads_of_rank
from tandem.kvtransfer.base import HeadShare, KVCacheMemory
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.ranks.thread import RankTransfers
from tandem.kvtransfer.nixl.transport import BlockArray, NixlAgent

LLAMA_1B = CacheShape(layers=16, heads=8)
_HEAD_BYTES = BLOCK_SIZE * HEAD_DIM * 2  # of one layer's keys, or of its values


def parse_widths(widths: str) -> tuple[int, int]:
    """Parses the numbers of ranks of the two nodes, such as "2x4"."""
    producer, _, consumer = widths.partition("x")
    known = [width for width in range(1, LLAMA_1B.heads + 1) if LLAMA_1B.heads % width == 0]
    for width in (producer, consumer):
        if not width.isdecimal() or int(width) not in known:
            raise argparse.ArgumentTypeError(
                f"{widths!r} is not two numbers of ranks, such as 2x4: each must be one of "
                f"{', '.join(map(str, known))}, which divide the {LLAMA_1B.heads} heads"
            )
    return int(producer), int(consumer)


class RawShard(NamedTuple):
    """What a raw mover must know about a rank of the other node."""

    metadata: bytes
    address: int
    share: HeadShare


class _RawPeer(NamedTuple):
    name: str
    shard: RawShard
    prepared: int | None  # set if both ranks have the same heads, so that whole blocks are moved


class RawPairs:
    """NIXL's agent alone at one rank: one operation to each rank of the other node that has some of the same heads, all at once. Descriptors are
    made before the clock starts."""

    def __init__(self, name: str, cache: torch.Tensor, share: HeadShare) -> None:
        self._agent = NixlAgent(name, NixlOptions())
        self._cache, self._share = cache, share
        self._agent.register("DRAM", cache.data_ptr(), cache.nbytes, 0)
        self.shard = RawShard(self._agent.metadata(), cache.data_ptr(), share)
        self._prepared = self._agent.prepare(None, "DRAM", self._whole(self.shard, len(cache)))
        self._peers: list[_RawPeer] = []

    def connect(self, shards: Sequence[RawShard]) -> None:
        for shard in shards:
            first, end = self._common(shard)
            if first >= end:
                continue
            name = self._agent.add_remote(shard.metadata)
            prepared = None
            if shard.share == self._share:
                prepared = self._agent.prepare(name, "DRAM", self._whole(shard, len(self._cache)))
            self._peers.append(_RawPeer(name, shard, prepared))

    def move(self, direction: str, blocks: int) -> tuple[float, float]:
        """Returns when it began, and when everything had arrived."""
        operation = "write" if direction == "push" else "read"
        ids = np.arange(1, blocks + 1)
        described = [
            None if peer.prepared is not None else (self._pieces(self.shard, peer, ids), self._pieces(peer.shard, peer, ids))
            for peer in self._peers
        ]  # fmt: skip
        handles = []
        began = time.monotonic()
        for peer, pieces in zip(self._peers, described, strict=True):
            if pieces is None:
                started = self._agent.start(operation, self._prepared, ids, peer.prepared or 0, ids)
            else:
                ours, theirs = pieces
                started = self._agent.start_described(operation, ("DRAM", ours), ("DRAM", theirs), peer.name)
            handles.append(started)
        left = [handle for handle, done in handles if not done]
        while left := [handle for handle in left if not self._agent.is_done(handle)]:
            os.sched_yield()  # lets other ranks on the same core run
        ended = time.monotonic()
        for handle, _ in handles:
            self._agent.release(handle)
        return began, ended

    def _common(self, shard: RawShard) -> tuple[int, int]:
        mine, other = self._share, shard.share
        return max(mine.first, other.first), min(mine.first + mine.count, other.first + other.count)

    def _block_bytes(self, shard: RawShard) -> int:
        return self._cache.shape[1] * 2 * shard.share.count * _HEAD_BYTES

    def _whole(self, shard: RawShard, blocks: int) -> BlockArray:
        return _described(shard.address + np.arange(blocks) * self._block_bytes(shard), self._block_bytes(shard))

    def _pieces(self, shard: RawShard, peer: _RawPeer, blocks: np.ndarray) -> BlockArray:
        """Returns the common heads of each layer's keys and of its values in each block, which are one run each."""
        first, end = self._common(peer.shard)
        layers = np.arange(self._cache.shape[1] * 2) * shard.share.count
        inside = (layers + first - shard.share.first) * _HEAD_BYTES
        places = (blocks[:, None] * self._block_bytes(shard) + inside).reshape(-1)
        return _described(shard.address + places, (end - first) * _HEAD_BYTES)

    def close(self) -> None:
        self._agent.close()


def _described(addresses: np.ndarray, length: int) -> BlockArray:
    described = np.zeros((len(addresses), 3), dtype=np.uint64)
    described[:, 0], described[:, 1] = addresses, length
    return described


class _RankOfNode:
    """What the benchmark asks of every rank, rank 0 included."""

    cache: torch.Tensor
    pairs: RawPairs

    def cpu_seconds(self) -> float:
        return time.process_time()

    def fill(self, value: float) -> None:
        self.cache.fill_(value)

    def values_of_blocks(self) -> list[float | None]:
        """Returns the one value in each block; None for a block with several."""
        values = [block.unique().tolist() for block in self.cache]
        return [found[0] if len(found) == 1 else None for found in values]

    def raw_shard(self) -> RawShard:
        return self.pairs.shard

    def connect_pairs(self, shards: Sequence[RawShard]) -> None:
        self.pairs.connect(shards)

    def move_pairs(self, direction: str, blocks: int) -> tuple[float, float]:
        return self.pairs.move(direction, blocks)


class LeadingRank(_RankOfNode, TransferNode):
    def __init__(
        self,
        node_id: str,
        epoch: int,
        num_blocks: int,
        config: TransferConfig,
        share: HeadShare,
        rank_lines: Sequence[socket.socket],
    ) -> None:
        apart = share if rank_lines else None
        super().__init__(node_id, epoch, num_blocks, config, "cpu", "", LLAMA_1B, apart, rank_lines)
        self.pairs = RawPairs(f"raw-{node_id}-0", self.cache, share)

    def close(self) -> None:
        self.pairs.close()
        super().close()


class OtherRank(_RankOfNode):
    def __init__(self, name: str, num_blocks: int, share: HeadShare, line: socket.socket) -> None:
        torch.set_num_threads(1)
        self.cache = LLAMA_1B.of_share(share, num_blocks, "cpu")
        memory = KVCacheMemory(self.cache, "benchmark", LLAMA_1B.layers, 1, 1000, heads=share)
        self._transfers = RankTransfers(line, memory, lambda: os._exit(1))
        self._transfers.start()
        self.pairs = RawPairs(f"raw-{name}", self.cache, share)

    def close(self) -> None:
        self.pairs.close()
        self._transfers.stop(10.0)


def start_ranks(node_id: str, epoch: int, num_blocks: int, config: TransferConfig, width: int) -> list[Remote]:
    shares = [
        HeadShare(kept.start, len(kept), LLAMA_1B.heads)
        for kept in (heads_of_rank(LLAMA_1B.heads, rank, width) for rank in range(width))
    ]
    ends = [socket.socketpair() for _ in range(1, width)]
    others = [
        Remote(OtherRank, f"{node_id}-{rank}", num_blocks, shares[rank], theirs)
        for rank, (_, theirs) in enumerate(ends, start=1)
    ]
    lines = [ours for ours, _ in ends]
    leading = Remote(LeadingRank, node_id, epoch, num_blocks, config, shares[0], lines)
    for ours, theirs in ends:  # the processes hold their own ends
        ours.close()
        theirs.close()
    return [leading, *others]


class RankPairs(TransferPair):
    """Two nodes of several ranks."""

    def __init__(self, widths: tuple[int, int], blocks: int, config: TransferConfig, repeats: int) -> None:
        producers = start_ranks("p", 1, blocks, config, widths[0])
        consumers = start_ranks("c", 2, blocks, config, widths[1])
        self.ranks = [*producers, *consumers]
        self._movers, moved = producers, consumers
        if config.direction == "pull":
            self._movers, moved = moved, self._movers
        shards = [rank.call("raw_shard") for rank in moved]
        for rank in moved:  # as in the connector, an agent knows who moves its blocks
            rank.call("connect_pairs", [mover.call("raw_shard") for mover in self._movers])
        for rank in self._movers:
            rank.call("connect_pairs", shards)
        super().__init__(producers[0], consumers[0], config.direction, LLAMA_1B.block_bytes, repeats)
        self.move_raw(1)

    def move_raw(self, blocks: int) -> float:
        for rank in self._movers:
            rank.begin("move_pairs", self.direction, blocks)
        times: list[Any] = [rank.result() for rank in self._movers]
        return float(max(ended for _, ended in times) - min(began for began, _ in times))

    def cpu(self, tokens: int, at_once: int) -> dict[str, float]:
        """Returns the CPU time of all ranks of both nodes, which neither other work nor ranks that share a core change."""
        spent = {"raw": 0.0, "connector": 0.0}
        for _ in range(self.repeats):
            for name in spent:
                before = self._cpu_seconds()
                if name == "raw":
                    self.move_raw(blocks_of(tokens, at_once))
                else:
                    self.transfer(tokens, at_once)
                spent[name] += self._cpu_seconds() - before
        gigabytes = self.repeats * blocks_of(tokens, at_once) * self.block_bytes / 1e9
        return {f"{name}_s_per_gb": round(seconds / gigabytes, 3) for name, seconds in spent.items()}

    def _cpu_seconds(self) -> float:
        return sum(float(rank.call("cpu_seconds")) for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
