"""The nodes of `benchmarks.transfer`: nodes without a model, and the transport alone in the same processes."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.lib.engines import request_of
from benchmarks.lib.processes import Remote
from tandem.engine.request import Request
from tandem.kvtransfer.base import ConnectorContext, ConnectorOutput, HeadShare, KVCacheMemory
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.transport import BlockArray, NixlAgent
from tandem.kvtransfer.registry import find_connector
from tandem.wire.endpoints import key_of
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, TransferRole
from tandem.wire.sampling import SamplingParams
from tandem.wire.sockets import admit

BLOCK_SIZE, HEAD_DIM = 16, 64
_HEAD_BYTES = BLOCK_SIZE * HEAD_DIM * 2  # of one layer's keys, or of its values
_PATIENCE_S = 120.0


class CacheShape(NamedTuple):
    layers: int
    heads: int  # KV heads of all ranks together

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.heads * BLOCK_SIZE * HEAD_DIM * 2

    def of_share(self, share: HeadShare | None, num_blocks: int, device: str) -> torch.Tensor:
        heads = self.heads if share is None else share.count
        cache = torch.empty(
            num_blocks, self.layers, 2, heads, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device
        )
        # Touched: a page that was never written would be mapped during the first transfer
        return cache.fill_(1.0)


SMOLLM2 = CacheShape(layers=30, heads=3)
BLOCK_BYTES = SMOLLM2.block_bytes


@dataclasses.dataclass
class TransferStep:
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[str] = dataclasses.field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        return ()


class RawShard(NamedTuple):
    """What a raw mover must know about a rank of the other node."""

    metadata: bytes
    address: int
    share: HeadShare


class _RawPeer(NamedTuple):
    name: str
    shard: RawShard
    prepared: int | None  # set if both ranks have the same heads, so that whole blocks are moved


class RawRank:
    """A rank's memory, what the benchmark asks of every rank, and NIXL's agent alone on that memory: one operation to each rank of the other
    node that has some of the same heads, all at once. Descriptors are made before the clock starts."""

    def __init__(self, name: str, cache: torch.Tensor, share: HeadShare) -> None:
        self.cache = cache
        self._raw_name, self._share = f"raw-{name}", share
        self._memory = "VRAM" if cache.is_cuda else "DRAM"
        self._device = cache.get_device() if cache.is_cuda else 0
        self._agent: NixlAgent | None = None
        self._raw_peers: list[_RawPeer] = []

    def cpu_seconds(self) -> float:
        return time.process_time()

    def fill(self, value: float) -> None:
        self.cache.fill_(value)

    def values_of_blocks(self) -> list[float | None]:
        """Returns the one value in each block; None for a block with several."""
        values = [block.unique().tolist() for block in self.cache]
        return [found[0] if len(found) == 1 else None for found in values]

    def open_raw(self) -> RawShard:
        """Begins the agent: a rank without one is idle."""
        cache = self.cache
        self._agent = NixlAgent(self._raw_name, NixlOptions())
        self._agent.register(self._memory, cache.data_ptr(), cache.nbytes, self._device)
        self._shard = RawShard(self._agent.metadata(), cache.data_ptr(), self._share)
        self._prepared = self._agent.prepare(None, self._memory, self._whole(self._shard, len(cache)))
        return self._shard

    def connect_raw(self, shards: Sequence[RawShard]) -> None:
        assert self._agent is not None
        for shard in shards:
            first, end = self._common(shard)
            if first >= end:
                continue
            name = self._agent.add_remote(shard.metadata)
            prepared = None
            if shard.share == self._share:
                prepared = self._agent.prepare(name, self._memory, self._whole(shard, len(self.cache)))
            self._raw_peers.append(_RawPeer(name, shard, prepared))

    def move_raw(self, direction: str, blocks: int) -> tuple[float, float]:
        """Returns when it began, and when everything had arrived."""
        agent = self._agent
        assert agent is not None
        operation = "write" if direction == "push" else "read"
        ids = np.arange(1, blocks + 1)
        described = [
            None if peer.prepared is not None else (self._pieces(self._shard, peer, ids), self._pieces(peer.shard, peer, ids))
            for peer in self._raw_peers
        ]  # fmt: skip
        handles = []
        began = time.monotonic()
        for peer, pieces in zip(self._raw_peers, described, strict=True):
            if pieces is None:
                started = agent.start(operation, self._prepared, ids, peer.prepared or 0, ids)
            else:
                ours, theirs = pieces
                started = agent.start_described(operation, (self._memory, ours), (self._memory, theirs), peer.name)
            handles.append(started)
        left = [handle for handle, done in handles if not done]
        while left := [handle for handle in left if not agent.is_done(handle)]:
            os.sched_yield()  # lets other ranks on the same core run
        ended = time.monotonic()
        for handle, _ in handles:
            agent.release(handle)
        return began, ended

    def _common(self, shard: RawShard) -> tuple[int, int]:
        mine, other = self._share, shard.share
        return max(mine.first, other.first), min(mine.first + mine.count, other.first + other.count)

    def _block_bytes(self, shard: RawShard) -> int:
        return self.cache.shape[1] * 2 * shard.share.count * _HEAD_BYTES

    def _whole(self, shard: RawShard, blocks: int) -> BlockArray:
        return self._described(shard.address + np.arange(blocks) * self._block_bytes(shard), self._block_bytes(shard))

    def _pieces(self, shard: RawShard, peer: _RawPeer, blocks: np.ndarray) -> BlockArray:
        """Returns the common heads of each layer's keys and of its values in each block, which are one run each."""
        first, end = self._common(peer.shard)
        layers = np.arange(self.cache.shape[1] * 2) * shard.share.count
        inside = (layers + first - shard.share.first) * _HEAD_BYTES
        places = (blocks[:, None] * self._block_bytes(shard) + inside).reshape(-1)
        return self._described(shard.address + places, (end - first) * _HEAD_BYTES)

    def _described(self, addresses: np.ndarray, length: int) -> BlockArray:
        described = np.zeros((len(addresses), 3), dtype=np.uint64)
        described[:, 0], described[:, 1], described[:, 2] = addresses, length, self._device
        return described

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()


class TransferNode(RawRank):
    """A step loop without a model, and the two halves of a connector."""

    def __init__(
        self,
        node_id: str,
        epoch: int,
        num_blocks: int,
        config: TransferConfig,
        device: str,
        shape: CacheShape = SMOLLM2,
        share: HeadShare | None = None,
        rank_lines: Sequence[socket.socket] = (),
    ) -> None:
        """`share` says which heads it has as rank 0 of a node whose other ranks are
        at the ends of `rank_lines`; see `transfer_ranks`."""
        torch.set_num_threads(1)
        self.node_id = node_id
        self._peers: set[str] = set()
        self.shape = shape
        super().__init__(
            node_id, shape.of_share(share, num_blocks, device), share or HeadShare(0, shape.heads, shape.heads)
        )
        self.wake = threading.Event()
        self.scheduler_half, self.worker_half = find_connector(config.connector)(
            ConnectorContext(node_id, epoch, "127.0.0.1", BLOCK_SIZE, config, self.wake.set, rank_lines=rank_lines)
        )
        self.worker_half.register_kv_caches(KVCacheMemory(self.cache, "benchmark", shape.layers, 1, 1000, heads=share))
        self.step_seconds: list[float] = []

    def endpoint(self) -> str:
        return self.worker_half.peer_endpoint

    def step(self, scheduled: dict[str, int] | None = None, compute_s: float = 0.0) -> tuple[ConnectorOutput, float]:
        began = time.perf_counter()
        metadata = self.scheduler_half.build_connector_meta(TransferStep(scheduled or {}))
        self.worker_half.bind_connector_metadata(metadata)
        self.worker_half.start_load_kv()
        spent = time.perf_counter() - began
        if self.worker_half.layerwise:
            for layer in range(self.shape.layers):
                _compute(compute_s / self.shape.layers)
                began = time.perf_counter()
                self.worker_half.save_kv_layer(layer)
                spent += time.perf_counter() - began
        else:
            _compute(compute_s)
        computed_at = time.monotonic()
        began = time.perf_counter()
        self.worker_half.wait_for_save()
        output = self.worker_half.get_finished(set())
        self.scheduler_half.update_connector_output(output)
        self.step_seconds.append(spent + time.perf_counter() - began)
        return output, computed_at

    def _admit(self, names: list[str], tokens: int, role: TransferRole, peer: PeerAddress) -> list[Request]:
        self._peers.add(key_of(peer.endpoint))
        admit(self._peers)
        requests = []
        for name, blocks in zip(names, _blocks_for(len(names), tokens), strict=True):
            transfer = KVTransferParams(f"t-{name}", role, peer)
            request = request_of(name, list(range(tokens)), SamplingParams(), transfer=transfer)
            self.scheduler_half.on_new_request(request)
            external, _ = self.scheduler_half.get_num_new_matched_tokens(request, 0)
            self.scheduler_half.update_state_after_alloc(request, [blocks], external or 0)
            requests.append(request)
        return requests

    def _step_until(self, missing: set[str], ended: Callable[[ConnectorOutput], set[str]]) -> list[float]:
        """Returns when each of these transfers ended."""
        ended_at: list[float] = []
        while missing:
            self.wake.clear()
            output, _ = self.step()
            now = time.monotonic()
            ended_at += [now] * len(missing & ended(output))
            missing = missing - ended(output)
            if missing and not self.wake.wait(_PATIENCE_S):
                raise TimeoutError(f"{len(missing)} transfers did not end")
        return ended_at

    def receive(self, names: list[str], tokens: int, peer: PeerAddress) -> float:
        """Returns when the scheduler knew of the last of them."""

        def ended(output: ConnectorOutput) -> set[str]:
            if output.failed_recving:
                raise RuntimeError(f"a transfer failed: {output.failed_recving}")
            return set(output.finished_recving)

        self._admit(names, tokens, TransferRole.CONSUME, peer)
        return self._step_until(set(names), ended)[-1]

    def send(self, names: list[str], tokens: int, peer: PeerAddress, chunks: int = 1, compute_s: float = 0.0) -> float:
        """Returns when the last forward pass had ended."""
        requests = self._admit(names, tokens, TransferRole.PRODUCE, peer)
        for _ in range(chunks):
            _, computed_at = self.step(dict.fromkeys(names, tokens // chunks), compute_s)
        for request, blocks in zip(requests, _blocks_for(len(names), tokens), strict=True):
            request.append_output_token(7)
            if not self.scheduler_half.request_finished(request, [blocks]):
                raise RuntimeError("the connector did not keep a prompt's blocks")
        self._step_until(set(names), lambda output: set(output.finished_sending))
        return computed_at

    def idle_cpu_percent(self, seconds: float) -> float:
        began = time.process_time()
        time.sleep(seconds)
        return 100 * (time.process_time() - began) / seconds

    def take_step_seconds(self) -> list[float]:
        taken, self.step_seconds = self.step_seconds, []
        return taken

    def overlapped(self) -> tuple[int, int]:
        stats = self.worker_half.stats()
        return stats.bytes_overlapped, stats.bytes_sent

    def close(self) -> None:
        super().close()
        self.worker_half.shutdown()


def _blocks_for(requests: int, tokens: int) -> list[list[int]]:
    each = -(-tokens // BLOCK_SIZE)
    return [list(range(first, first + each)) for first in range(1, 1 + requests * each, each)]


def _compute(seconds: float) -> None:
    if not seconds:
        return
    until = time.perf_counter() + seconds
    matrix = torch.ones(256, 256)
    while time.perf_counter() < until:
        torch.mm(matrix, matrix)


class TransferPair:
    """Two nodes, with prompts that go from one to the other."""

    def __init__(
        self, producers: list[Remote], consumers: list[Remote], direction: str, block_bytes: int, repeats: int
    ) -> None:
        """The ranks of both nodes; a consumer reads or a producer writes."""
        self.ranks = [*producers, *consumers]
        self._producers, self._consumers = producers, consumers
        self.producer, self.consumer = producer, consumer = producers[0], consumers[0]
        self.movers, self._moved = (producers, consumers) if direction == "push" else (consumers, producers)
        self.direction = direction
        self.block_bytes = block_bytes
        self.repeats = repeats
        self._addresses = {
            "p": PeerAddress("p", 1, producer.call("endpoint")),
            "c": PeerAddress("c", 2, consumer.call("endpoint")),
        }
        self._names = (f"r{number}" for number in itertools.count())
        self.transfer(16, 1)

    def open_raw(self) -> None:
        movers, moved = ([rank.call("open_raw") for rank in ranks] for ranks in (self.movers, self._moved))
        # As in the connector, an agent knows who moves its blocks.
        for ranks, others in ((self._moved, movers), (self.movers, moved)):
            for rank in ranks:
                rank.call("connect_raw", others)
        self.move_raw(1)

    def move_raw(self, blocks: int) -> float:
        """Returns the seconds that the transport alone takes for these blocks."""
        for rank in self.movers:
            rank.begin("move_raw", self.direction, blocks)
        times: list[Any] = [rank.result() for rank in self.movers]
        return float(max(ended for _, ended in times) - min(began for began, _ in times))

    def cpu(self, tokens: int, at_once: int) -> dict[str, float]:
        """Returns the CPU time per GB of all ranks of each node, and of the transport alone, which neither other work nor ranks that share a
        core change."""
        spent = dict.fromkeys(("producer", "consumer", "raw"), 0.0)
        for _ in range(self.repeats):
            before = self._cpu_seconds()
            self.transfer(tokens, at_once)
            between = self._cpu_seconds()
            self.move_raw(blocks_of(tokens, at_once))
            spent["raw"] += sum(self._cpu_seconds()) - sum(between)
            spent["producer"] += between[0] - before[0]
            spent["consumer"] += between[1] - before[1]
        gigabytes = self.repeats * blocks_of(tokens, at_once) * self.block_bytes / 1e9
        return {f"{name}_s_per_gb": round(seconds / gigabytes, 3) for name, seconds in spent.items()}

    def _cpu_seconds(self) -> tuple[float, float]:
        producer, consumer = (
            sum(float(rank.call("cpu_seconds")) for rank in ranks) for ranks in (self._producers, self._consumers)
        )
        return producer, consumer

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def transfer(self, tokens: int, at_once: int, chunks: int = 1, compute_s: float = 0.0) -> float:
        names = [next(self._names) for _ in range(at_once)]
        self.consumer.begin("receive", names, tokens, self._addresses["p"])
        time.sleep(0.02)  # long enough for the registrations to arrive, as they do while a prompt is computed
        self.producer.begin("send", names, tokens, self._addresses["c"], chunks, compute_s)
        arrived_at = self.consumer.result()
        computed_at = self.producer.result()
        return float(arrived_at - computed_at)

    def throughput(self, cases: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """`cases` are pairs of tokens per request and requests at once."""
        rows = []
        for tokens, at_once in cases:
            blocks = blocks_of(tokens, at_once)
            # Alternating, so that other work on the machine affects both.
            pairs = [(self.move_raw(blocks), self.transfer(tokens, at_once)) for _ in range(self.repeats)]
            raw_s, ours_s = (min(seconds) for seconds in zip(*pairs, strict=True))
            size = blocks * self.block_bytes
            rows.append(
                {
                    "tokens": tokens,
                    "requests": at_once,
                    "mb": round(size / 1e6, 1),
                    "raw_ms": round(raw_s * 1e3, 2),
                    "ms": round(ours_s * 1e3, 2),
                    "raw_gb_s": round(size / raw_s / 1e9, 2),
                    "gb_s": round(size / ours_s / 1e9, 2),
                    "of_raw": round(raw_s / ours_s, 2),
                }
            )
        return rows


def blocks_of(tokens: int, requests: int) -> int:
    return tokens // BLOCK_SIZE * requests
