"""The miniature engine as a node of several ranks, each with its own memory for its heads and its stage's layers. Rank 0 is the engine's
process. The other ranks are its threads, or processes as in a real node; the engine maps their memory, so that tests can read it."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kv_fake_engine import DIM, HEADS, SLOTS, FakeEngine, FakeRequest, State, kv_of

from tandem.engine.model.shard import heads_of_rank
from tandem.kvtransfer.base import HeadShare, KVCacheMemory, LayerShare
from tandem.kvtransfer.nixl.ranks.thread import RankTransfers
from tests.waiting import until

PATIENCE_S = 20.0


def mapped(descriptor: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize
    for axis in shape:
        size *= axis
    os.ftruncate(descriptor, size)
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=dtype).view(shape)


def memory_of(cache: torch.Tensor, heads: HeadShare, layers: range) -> KVCacheMemory:
    share = LayerShare(((layers.start, len(layers)),), SLOTS) if len(layers) < SLOTS else None
    return KVCacheMemory(cache, "fake", SLOTS, 1, 1000, heads=heads, layers=share)


class ForkedRank:
    """A rank as a process of its own. It is forked before the engine has threads or a NIXL agent, so nothing is imported again."""

    def __init__(self, work: Callable[[], None], keeps: set[int]) -> None:
        """`keeps`: the only open files that the process has of this one's."""
        self._ended = False
        self.pid = os.fork()
        if self.pid:
            return
        try:
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in keeps:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        if not self._ended:
            until(lambda: os.waitpid(self.pid, os.WNOHANG) != (0, 0), timeout_s)
            self._ended = True


class WideFakeEngine(FakeEngine):
    def __init__(
        self, *args: Any, ranks: int, cuts: Sequence[int] = (), processes: bool = False, **kwargs: Any
    ) -> None:
        """`ranks`: the number of ranks of all stages. `cuts`: the first layer of each stage after the first."""
        self._num_ranks, self._processes = ranks, processes
        self._cuts = (0, *cuts, SLOTS)
        self.shares: list[HeadShare] = []
        self.layers: list[range] = []  # by rank
        self.caches: list[torch.Tensor] = []  # by rank
        self.threads: list[RankTransfers] = []
        self.others: list[ForkedRank] = []
        self.died: list[int] = []
        super().__init__(*args, **kwargs)

    def make_cache(self, num_blocks: int, dtype: torch.dtype, tokens_before_heads: bool) -> None:
        assert not tokens_before_heads
        width = self._num_ranks // (len(self._cuts) - 1)
        for rank in range(self._num_ranks):
            kept, stage = heads_of_rank(HEADS, rank % width, width), rank // width
            share = HeadShare(kept.start, len(kept), HEADS)
            layers = range(*self._cuts[stage : stage + 2])
            shape = (num_blocks, len(layers), 2, share.count, self.block_size, DIM)
            memory = os.memfd_create("kv-of-rank")
            self.shares.append(share)
            self.layers.append(layers)
            self.caches.append(mapped(memory, shape, dtype))
            if rank:
                self._begin(rank, share, memory, shape)
            os.close(memory)
        self.cache = self.caches[0]

    def _begin(self, rank: int, share: HeadShare, memory: int, shape: tuple[int, ...]) -> None:
        ours, theirs = socket.socketpair()
        self.rank_lines.append(ours)
        if not self._processes:
            cache = memory_of(self.caches[rank], share, self.layers[rank])
            thread = RankTransfers(theirs, cache, lambda: self.died.append(rank))
            thread.start()
            self.threads.append(thread)
            return
        layers = self.layers[rank]
        self.others.append(
            ForkedRank(lambda: serve_rank(theirs.fileno(), memory, share, layers, shape), {theirs.fileno(), memory})
        )
        theirs.close()

    def memory(self) -> KVCacheMemory:
        return memory_of(self.cache, self.shares[0], self.layers[0])

    def kill_rank(self, rank: int) -> None:
        self.others[rank - 1].kill()
        self.others[rank - 1].wait(PATIENCE_S)

    def rank_pid(self, rank: int) -> int:
        return self.others[rank - 1].pid

    def stop_rank(self, rank: int) -> None:
        os.kill(self.others[rank - 1].pid, signal.SIGSTOP)
        # Its threads stand still one after another, and on a busy machine the one that moves blocks may be the last.
        os.waitpid(self.others[rank - 1].pid, os.WUNTRACED)

    def resume_rank(self, rank: int) -> None:
        os.kill(self.others[rank - 1].pid, signal.SIGCONT)

    def scribble(self, block: int) -> None:
        for cache in self.caches:
            cache[block].fill_(-1.0)

    def kv_is_right(self, request_id: str) -> bool:
        request = self.requests[request_id]
        end = request.valid_tokens if request.state is State.FAILED else request.num_prompt_tokens
        expected = kv_of(request.all_token_ids[:end])
        for share, layers, cache in zip(self.shares, self.layers, self.caches, strict=True):
            kept, mine = slice(share.first, share.first + share.count), slice(layers.start, layers.stop)
            for position in range(end):
                block, behind = divmod(position, self.block_size)
                found = cache[request.blocks[block], :, :, :, behind, :]
                if not torch.equal(found, expected[mine, :, kept, position].to(cache.dtype)):
                    return False
        return True

    def _write(self, request: FakeRequest, positions: range, layers: range) -> None:
        values = kv_of(request.all_token_ids)
        for share, own, cache in zip(self.shares, self.layers, self.caches, strict=True):
            kept = slice(share.first, share.first + share.count)
            for position in positions:
                block, behind = divmod(position, self.block_size)
                for layer in range(max(layers.start, own.start), min(layers.stop, own.stop)):
                    target = cache[request.blocks[block], layer - own.start]
                    target[:, :, behind, :] = values[layer, :, kept, position]

    def close(self) -> None:
        super().close()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        for process in self.others:
            process.wait(PATIENCE_S)
        assert not self.died


def serve_rank(line: int, memory: int, share: HeadShare, layers: range, shape: tuple[int, ...]) -> None:
    cache = memory_of(mapped(memory, shape, torch.float32), share, layers)
    transfers = RankTransfers(socket.socket(fileno=line), cache, lambda: os._exit(1))
    transfers.start()
    transfers.join(3600.0)
