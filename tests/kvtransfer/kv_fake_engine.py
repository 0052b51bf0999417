"""A miniature engine: requests, blocks and a KV cache in which each value is a function of its token.

It drives a connector's two halves as `kvtransfer.base` describes, and checks the contract: no block that the connector holds is handed
out, and no id is reported twice.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from tandem.kvtransfer.base import ConnectorContext, ConnectorOutput, Handoff, KVCacheMemory, TransferStats
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.registry import find_connector
from tandem.wire.images import MediaFeature
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, TransferRole
from tests.idling import idle_share

BLOCK_SIZE = 4
SLOTS, HEADS, DIM = 4, 2, 8


class State(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    WAITING_FOR_KV = "waiting_for_kv"
    LOADED = "loaded"  # its KV came from the peer
    FAILED = "failed"  # its KV will not come
    ENDED = "ended"  # the connector keeps its blocks
    FREED = "freed"


@dataclasses.dataclass
class FakeRequest:
    request_id: str
    all_token_ids: list[int]
    transfer: KVTransferParams | None
    chunk: int = 1 << 30
    cached_tokens: int = 0
    cache_salt: str | None = None
    lora: str | None = None
    media: Sequence[MediaFeature] = ()
    when_idle: bool = False
    num_computed_tokens: int = 0
    state: State = State.WAITING
    blocks: list[int] = dataclasses.field(default_factory=list)
    handoff: Handoff | None = None
    failure: str = ""
    valid_tokens: int = 0  # how many tokens of a failed load are valid

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.all_token_ids[self.num_prompt_tokens :]


@dataclasses.dataclass
class FakeStep:
    num_scheduled_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    preempted_req_ids: set[str] = dataclasses.field(default_factory=set)
    new_blocks: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        return [self.new_blocks[request_id]] if request_id in self.new_blocks else ()


def kv_of(tokens: Sequence[int]) -> torch.Tensor:
    """The right KV of each position: [slots, 2, heads, tokens, dim]. All values differ."""
    values = torch.tensor([1000.0 * token + position for position, token in enumerate(tokens)])
    places = torch.arange(SLOTS * 2 * HEADS * DIM).view(SLOTS, 2, HEADS, 1, DIM) / 128
    return values.view(1, 1, 1, -1, 1) + places


def first_token_of(tokens: Sequence[int]) -> int:
    return sum(tokens) % 997


class FakeEngine:
    def __init__(
        self,
        connector: str,
        node_id: str,
        epoch: int,
        config: TransferConfig,
        num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
        tokens_before_heads: bool = False,
    ) -> None:
        self.block_size = block_size
        self.rank_lines: list[socket.socket] = []
        self.make_cache(num_blocks, dtype, tokens_before_heads)
        self.free = list(range(1, num_blocks))
        self.requests: dict[str, FakeRequest] = {}
        self.quarantined: set[int] = set()
        self.reported: set[tuple[str, str]] = set()
        self._woken = threading.Event()
        self._preempt_next: set[str] = set()
        context = ConnectorContext(node_id, epoch, "127.0.0.1", block_size, config, self._woken.set)
        context = msgspec.structs.replace(context, rank_lines=self.rank_lines)
        self.scheduler_half, self.worker_half = find_connector(connector)(context)
        self.worker_half.register_kv_caches(self.memory())

    def make_cache(self, num_blocks: int, dtype: torch.dtype, tokens_before_heads: bool) -> None:
        block_size = self.block_size
        if tokens_before_heads:  # another layout of the same
            made = torch.zeros(num_blocks, SLOTS, 2, block_size, HEADS, DIM, dtype=dtype)
            self.cache = made.permute(0, 1, 2, 4, 3, 5)
        else:
            self.cache = torch.zeros(num_blocks, SLOTS, 2, HEADS, block_size, DIM, dtype=dtype)

    def memory(self) -> KVCacheMemory:
        return KVCacheMemory(self.cache, "fake", SLOTS, 1, 1000)

    # ── for tests ──

    def endpoint(self) -> str:
        return self.worker_half.peer_endpoint

    def add(
        self,
        request_id: str,
        tokens: list[int],
        transfer: KVTransferParams | None,
        chunk: int = 1 << 30,
        cached_tokens: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        request = FakeRequest(request_id, list(tokens), transfer, chunk, cached_tokens, cache_salt)
        self.requests[request_id] = request
        self.scheduler_half.on_new_request(request)

    def state(self, request_id: str) -> str:
        return self.requests[request_id].state.value

    def num_quarantined(self) -> int:
        return len(self.quarantined)

    def valid_tokens(self, request_id: str) -> int:
        return self.requests[request_id].valid_tokens

    def failure(self, request_id: str) -> str:
        return self.requests[request_id].failure

    def handoff(self, request_id: str) -> Handoff | None:
        return self.requests[request_id].handoff

    def num_free(self) -> int:
        return len(self.free)

    def num_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def stats(self) -> TransferStats:
        return self.worker_half.stats()

    def kv_is_right(self, request_id: str) -> bool:
        request = self.requests[request_id]
        end = request.valid_tokens if request.state is State.FAILED else request.num_prompt_tokens
        expected = kv_of(request.all_token_ids[:end])
        return all(
            bool((self._slot(request, position) == expected[:, :, :, position]).all()) for position in range(end)
        )

    def step(self) -> None:
        step = FakeStep(preempted_req_ids=self._preempt_next)
        self._preempt_next = set()
        for request in list(self.requests.values()):
            if request.state is State.WAITING:
                self._admit(request)
        for request in self.requests.values():
            if request.state is State.RUNNING:
                self._schedule(request, step)
        self.worker_half.bind_connector_metadata(self.scheduler_half.build_connector_meta(step))
        if step.preempted_req_ids:
            self.worker_half.handle_preemptions()
        self.worker_half.start_load_kv()
        self._forward(step)
        self.worker_half.wait_for_save()
        self._book(self.worker_half.get_finished(set()))
        for request_id in step.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.num_computed_tokens == request.num_prompt_tokens:
                request.all_token_ids.append(first_token_of(request.all_token_ids))
                self.finish(request_id)

    def idle_share(self) -> float:
        return idle_share()

    def run_until(self, request_id: str, states: Sequence[str], timeout_s: float = 20.0) -> str:
        """Steps until the request is in one of `states`, and returns it. Raises after `timeout_s`."""
        self._run(lambda: self.requests[request_id].state.value in states, timeout_s, f"{request_id} in {states}")
        return self.requests[request_id].state.value

    def run_until_free(self, blocks: int, timeout_s: float = 20.0) -> None:
        self._run(lambda: len(self.free) == blocks, timeout_s, f"{blocks} free blocks")

    def run_until_accounted_for(self, blocks: int, timeout_s: float = 20.0) -> None:
        """Steps until all blocks are free or in quarantine."""
        self._run(lambda: len(self.free) + len(self.quarantined) == blocks, timeout_s, f"{blocks} blocks back")

    def _run(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        until = time.monotonic() + timeout_s
        while True:
            self._woken.clear()
            self.step()
            if reached():
                return
            if any(request.state is State.RUNNING for request in self.requests.values()):
                continue
            if self.scheduler_half.has_pending_work():
                continue
            if not self._woken.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                states = {request.request_id: request.state.value for request in self.requests.values()}
                raise TimeoutError(f"no {what} after {timeout_s} s: {states}, {len(self.free)} free")

    def finish(self, request_id: str) -> None:
        """Ends the request: its prompt is computed, it is aborted, or it has decoded all tokens."""
        request = self.requests[request_id]
        if request.state in (State.ENDED, State.FREED):
            return
        kept = self.scheduler_half.request_finished(request, [request.blocks])
        if kept:
            request.state = State.ENDED
        else:
            self._release(request)

    def forget_freed(self) -> None:
        """Forgets ended requests, because each step walks over all that the engine knows."""
        self.requests = {
            request_id: request for request_id, request in self.requests.items() if request.state is not State.FREED
        }

    def preempt(self, request_id: str) -> None:
        """Takes a running request's blocks and overwrites them, as their next owner would."""
        request = self.requests[request_id]
        assert request.state is State.RUNNING
        self._preempt_next.add(request_id)
        for block in request.blocks:
            self.free.append(block)
        taken, request.blocks = request.blocks, []
        request.num_computed_tokens = 0
        request.state = State.WAITING_FOR_KV  # only the step that announces it may admit it
        self.step()
        for block in taken:
            self.scribble(block)
        request.state = State.WAITING

    def scribble(self, block: int) -> None:
        self.cache[block].fill_(-1.0)

    def close(self) -> None:
        self.worker_half.shutdown()

    # ── the engine ──

    def _admit(self, request: FakeRequest) -> None:
        local = request.cached_tokens
        external, is_async = self.scheduler_half.get_num_new_matched_tokens(request, local)
        assert external is not None
        have = local + external
        request.blocks = self._take(-(-max(have, 1) // self.block_size))
        self._write(request, range(local), range(SLOTS))
        request.num_computed_tokens = local
        if not is_async:
            first = min(request.chunk, request.num_prompt_tokens - local)
            request.blocks += self._take(-(-(local + first) // self.block_size) - len(request.blocks))
        self.scheduler_half.update_state_after_alloc(request, [list(request.blocks)], external)
        request.state = State.WAITING_FOR_KV if is_async else State.RUNNING

    def _schedule(self, request: FakeRequest, step: FakeStep) -> None:
        count = min(request.chunk, request.num_prompt_tokens - request.num_computed_tokens)
        missing = -(-(request.num_computed_tokens + count) // self.block_size) - len(request.blocks)
        if missing > 0:
            step.new_blocks[request.request_id] = self._take(missing)
            request.blocks += step.new_blocks[request.request_id]
        step.num_scheduled_tokens[request.request_id] = count

    def _forward(self, step: FakeStep) -> None:
        """Computes the step layer by layer. Calls the connector after each layer only if the connector asks for it."""
        layerwise = self.worker_half.layerwise
        for layer in range(SLOTS):
            if layerwise:
                self.worker_half.wait_for_layer_load(layer)
            for request_id, count in step.num_scheduled_tokens.items():
                request = self.requests[request_id]
                first = request.num_computed_tokens
                self._write(request, range(first, first + count), range(layer, layer + 1))
            if layerwise:
                self.worker_half.save_kv_layer(layer)
                time.sleep(self.layer_s)
        for request_id, count in step.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += count

    layer_s = 0.0  # the seconds that a layer takes, if the connector is called for each layer

    def _write(self, request: FakeRequest, positions: range, layers: range) -> None:
        values = kv_of(request.all_token_ids)
        for position in positions:
            for layer in layers:
                self._slot(request, position)[layer] = values[layer, :, :, position]

    def _slot(self, request: FakeRequest, position: int) -> torch.Tensor:
        """[slots, 2, heads, dim]"""
        block, behind = divmod(position, self.block_size)
        return self.cache[request.blocks[block], :, :, :, behind, :]

    def _book(self, output: ConnectorOutput) -> None:
        self.scheduler_half.update_connector_output(output)
        for request_id in output.finished_sending:
            self._report(request_id, "sent")
            request = self.requests[request_id]
            assert request.state is State.ENDED, request.state
            self._release(request)
        for request_id, handoff in output.finished_recving.items():
            self._report(request_id, "received")
            request = self.requests[request_id]
            request.handoff = handoff
            self._after_load(request, State.LOADED)
        for request_id, failure in output.failed_recving.items():
            self._report(request_id, "received")
            request = self.requests[request_id]
            request.failure = failure.reason
            request.valid_tokens = failure.valid_tokens
            assert failure.unsafe_blocks <= set(request.blocks)
            self.quarantined |= failure.unsafe_blocks
            request.blocks = [block for block in request.blocks if block not in failure.unsafe_blocks]
            self._after_load(request, State.FAILED)

        assert output.released_blocks <= self.quarantined
        self.quarantined -= output.released_blocks
        self.free += output.released_blocks

    def _after_load(self, request: FakeRequest, state: State) -> None:
        if request.state is State.ENDED:  # it was aborted while it waited
            self._release(request)
        else:
            assert request.state is State.WAITING_FOR_KV, request.state
            request.state = state

    def _report(self, request_id: str, kind: str) -> None:
        assert (request_id, kind) not in self.reported, f"{request_id} was reported twice"
        self.reported.add((request_id, kind))

    def _take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the pool is used up"
        return taken

    def _release(self, request: FakeRequest) -> None:
        self.free += request.blocks
        request.blocks = []
        request.state = State.FREED


def produce(transfer_id: str, peer: object) -> KVTransferParams:
    return KVTransferParams(transfer_id, TransferRole.PRODUCE, peer)  # type: ignore[arg-type]


def consume(transfer_id: str, peer: object) -> KVTransferParams:
    return KVTransferParams(transfer_id, TransferRole.CONSUME, peer)  # type: ignore[arg-type]


def hand_over_by(config: TransferConfig) -> None:
    """Hands a prompt of 37 tokens over by this connector, in chunks."""
    producer = FakeEngine(config.connector, "p", 1, config)
    consumer = FakeEngine(config.connector, "c", 2, config)
    try:
        tokens = list(range(100, 137))
        consumer.add("r", tokens, consume("t", PeerAddress("p", 1, producer.endpoint())))
        producer.add("r", tokens, produce("t", PeerAddress("c", 2, consumer.endpoint())), chunk=8)
        consumer.step()
        producer.run_until("r", ["freed"])
        assert consumer.run_until("r", ["loaded", "failed"]) == "loaded", consumer.failure("r")
        assert consumer.kv_is_right("r")
    finally:
        producer.close()
        consumer.close()
