"""`benchmarks.transfer --ranks`: nodes whose ranks each have their heads in memory of their own and an agent in a process of their own, compared
with NIXL alone between the same pairs of processes.

Blocks are shaped like Llama 3.2 1B's: 16 layers, 8 KV heads of 64, 16 tokens, bf16: 512 KiB with all heads.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch

from benchmarks.lib.processes import Remote
from benchmarks.transfer_nodes import CacheShape, RawRank, TransferNode, TransferPair
from tandem.engine.model.shard import heads_of_rank
from tandem.kvtransfer.base import HeadShare, KVCacheMemory
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.nixl.ranks.thread import RankTransfers

LLAMA_1B = CacheShape(layers=16, heads=8)


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


class OtherRank(RawRank):
    def __init__(self, name: str, num_blocks: int, share: HeadShare, line: socket.socket) -> None:
        torch.set_num_threads(1)
        super().__init__(name, LLAMA_1B.of_share(share, num_blocks, "cpu"), share)
        memory = KVCacheMemory(self.cache, "benchmark", LLAMA_1B.layers, 1, 1000, heads=share)
        self._transfers = RankTransfers(line, memory, lambda: os._exit(1))
        self._transfers.start()

    def close(self) -> None:
        super().close()
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
    apart = shares[0] if lines else None
    leading = Remote(TransferNode, node_id, epoch, num_blocks, config, "cpu", LLAMA_1B, apart, lines)
    for ours, theirs in ends:  # the processes hold their own ends
        ours.close()
        theirs.close()
    return [leading, *others]


class RankPairs(TransferPair):
    """Two nodes of several ranks."""

    def __init__(self, widths: tuple[int, int], blocks: int, config: TransferConfig, repeats: int) -> None:
        producers = start_ranks("p", 1, blocks, config, widths[0])
        consumers = start_ranks("c", 2, blocks, config, widths[1])
        super().__init__(producers, consumers, config.direction, LLAMA_1B.block_bytes, repeats)
        self.open_raw()
