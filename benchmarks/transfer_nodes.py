"""The nodes of `benchmarks.transfer` and `benchmarks.links`: nodes without a model, and the transport alone in the same processes."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.lib.engines import request_of
from benchmarks.lib.link import enter
from benchmarks.lib.processes import Remote
from tandem.engine.request import Request
from tandem.kvtransfer.base import ConnectorContext, ConnectorOutput, HeadShare, KVCacheMemory
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.transport import NixlAgent, NixlTransport
from tandem.kvtransfer.protocol.transport import Move, Operation
from tandem.kvtransfer.registry import find_connector
from tandem.wire.endpoints import key_of
from tandem.wire.handoff import CacheMemory
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, TransferRole
from tandem.wire.sampling import SamplingParams
from tandem.wire.sockets import admit

BLOCK_SIZE, HEAD_DIM = 16, 64
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


class TransferNode:
    """A step loop without a model, and the two halves of a connector."""

    def __init__(
        self,
        node_id: str,
        epoch: int,
        num_blocks: int,
        config: TransferConfig,
        device: str,
        namespace: str = "",
        shape: CacheShape = SMOLLM2,
        share: HeadShare | None = None,
        rank_lines: Sequence[socket.socket] = (),
    ) -> None:
        """`namespace` is the machine that it is on; see `lib.link`. `share` says which heads it has as rank 0 of a node whose other ranks are
        at the ends of `rank_lines`; see `transfer_ranks`."""
        torch.set_num_threads(1)
        address = enter(namespace) if namespace else "127.0.0.1"
        self.node_id = node_id
        self.raw: RawMover | None = None
        self._peers: set[str] = set()
        self.shape = shape
        self.cache = shape.of_share(share, num_blocks, device)
        self.wake = threading.Event()
        self.scheduler_half, self.worker_half = find_connector(config.connector)(
            ConnectorContext(node_id, epoch, address, BLOCK_SIZE, config, self.wake.set, rank_lines=rank_lines)
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

    def receive_or_fail(self, names: list[str], tokens: int, peer: PeerAddress) -> list[float]:
        """Returns for each when the scheduler knew what became of it."""
        self._admit(names, tokens, TransferRole.CONSUME, peer)
        return self._step_until(set(names), lambda output: {*output.finished_recving, *output.failed_recving})

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

    def learn_rate(self, tokens_per_s: float) -> None:
        """Sets the rate that this node reports for computing prompts."""
        self.scheduler_half.step_took(int(tokens_per_s), 1.0)

    def outcomes(self) -> dict[str, int]:
        return self.worker_half.stats().outcomes

    def idle_cpu_percent(self, seconds: float) -> float:
        began = time.process_time()
        time.sleep(seconds)
        return 100 * (time.process_time() - began) / seconds

    def cpu_seconds(self) -> float:
        return time.process_time()

    def take_step_seconds(self) -> list[float]:
        taken, self.step_seconds = self.step_seconds, []
        return taken

    def overlapped(self) -> tuple[int, int]:
        stats = self.worker_half.stats()
        return stats.bytes_overlapped, stats.bytes_sent

    def open_raw(self) -> CacheMemory:
        self.raw = RawMover(f"raw-{self.node_id}", self.cache)
        return self.raw.memory

    def connect_raw(self, memory: CacheMemory) -> None:
        self._raw().connect(memory)

    def move_raw(self, direction: str, blocks: int) -> float:
        return self._raw().move(direction, blocks)

    def _raw(self) -> RawMover:
        if self.raw is None:
            raise RuntimeError("open_raw comes first")
        return self.raw

    def close(self) -> None:
        if self.raw is not None:
            self.raw.close()
        self.worker_half.shutdown()


class RawMover:
    """The transport alone: the NIXL agent that the connector uses, on the same memory, without protocol, threads or side channel."""

    def __init__(self, node_id: str, cache: torch.Tensor) -> None:
        self._transport = NixlTransport(NixlAgent(node_id, NixlOptions()))
        self.memory = self._transport.register(KVCacheMemory(cache, "benchmark", cache.shape[1], 1, 1000))

    def connect(self, memory: CacheMemory) -> None:
        self._remote = self._transport.connect(memory)

    def move(self, direction: str, blocks: int) -> float:
        ids = np.arange(1, blocks + 1)
        began = time.perf_counter()
        operation = Operation.WRITE if direction == "push" else Operation.READ
        handle = self._transport.post(self._remote, Move(operation, "raw", BLOCK_BYTES, ids, ids))
        while not self._transport.is_done(handle):
            pass
        return time.perf_counter() - began

    def close(self) -> None:
        self._transport.close()


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

    def __init__(self, producer: Remote, consumer: Remote, direction: str, block_bytes: int, repeats: int) -> None:
        self.producer, self.consumer = producer, consumer
        self.direction = direction
        self.block_bytes = block_bytes
        self.repeats = repeats
        self._addresses = {
            "p": PeerAddress("p", 1, producer.call("endpoint")),
            "c": PeerAddress("c", 2, consumer.call("endpoint")),
        }
        self._names = (f"r{number}" for number in itertools.count())
        self.transfer(16, 1)

    def move_raw(self, blocks: int) -> float:
        """Returns the seconds that the transport alone takes for these blocks."""
        raise NotImplementedError

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
