"""The two halves of a connector. The scheduler half turns what happens to requests into commands, and puts them into
the step's metadata. The worker half passes them to the protocol's thread, and collects the outcomes."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tandem.base.errors import InternalError
from tandem.kvtransfer.base import (
    BlockIds,
    ConnectorContext,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    KVCacheMemory,
    LoadFailure,
    ScheduledStep,
    SchedulerConnector,
    TransferRequest,
    TransferStats,
    WorkerConnector,
)
from tandem.kvtransfer.memory import fence_after
from tandem.kvtransfer.protocol.cache_map import PoolGeometry
from tandem.kvtransfer.protocol.checksums import CacheChecksums
from tandem.kvtransfer.protocol.commands import (
    AbandonSend,
    AnnounceSend,
    BeginGeneration,
    BeginReceive,
    BlockTable,
    CallBackSend,
    CancelReceive,
    Command,
    ComputedTokens,
    ComputesAt,
    DeclineTransfer,
    ExtendSend,
    Fence,
    FinishSend,
    FoundWrong,
    LayersComputed,
    PlanSend,
    PreemptedRequests,
    StepCommands,
    VoidSend,
)
from tandem.kvtransfer.protocol.endpoint import Channel, Outcomes, ProtocolLoop, SideChannel, TransferEndpoint
from tandem.kvtransfer.protocol.processes import has_ended, this_process
from tandem.kvtransfer.protocol.settings import ProtocolOptions, ProtocolSettings
from tandem.kvtransfer.protocol.side import Clock, ComputeRate, Identity, NodeSide, Recorder
from tandem.kvtransfer.protocol.transport import Direction, Transport
from tandem.wire.handoff import HandoffMessage, ProcessIdentity
from tandem.wire.images import MediaFeature
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, TransferRole
from tandem.wire.tracing import TransferTrace

STOP_GRACE_S = 1.0


@dataclasses.dataclass(slots=True)
class _Entry:
    """A request that takes part in a transfer."""

    transfer: KVTransferParams
    # When the request was added: the prompt, and the output that it arrived with if it moved here.
    num_tokens: int
    token_hash: bytes
    local_tokens: int = 0  # consumer: found in the prefix cache when the request was last admitted
    begun: bool = False  # the worker half has been told of the request's blocks
    done: bool = False  # consumer: the transfer has ended, well or not
    computed: int = 0  # producer: tokens whose KV is in the blocks after the steps planned so far
    # Producer: a step went on beyond the tokens that are sent, so the recurrent states are later ones.
    overran: bool = False


def token_hash(
    token_ids: Sequence[int], cache_salt: str | None, lora: str | None, media: Sequence[MediaFeature] = ()
) -> bytes:
    """What both nodes must agree on before one's KV becomes the other's: the same tokens under the same model, and the same
    images, or rows, where placeholders stand for them.

    Over all tokens, independent of block size, so that nodes with different blocks can compare. Without media it is what it was
    before media counted. A node from then refuses a handoff with media, and the decode node computes the prompt.
    """
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes())
    for part in (cache_salt, lora):
        encoded = b"" if part is None else part.encode()
        digest.update(b"\0" if part is None else b"\1")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    for each in media:
        encoded = each.identifier.encode()
        for number in (len(encoded), each.offset, each.length):
            digest.update(number.to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def _copied(block_ids: BlockIds) -> BlockTable:
    return [list(ids) for ids in block_ids]


class SchedulerHalf(SchedulerConnector):
    def __init__(self, block_size: int, state_blocks: int = 0) -> None:
        """`state_blocks`: see KVCacheMemory."""
        self._block_size = block_size
        self._state_blocks = state_blocks
        self._entries: dict[str, _Entry] = {}
        self._commands: list[Command] = []
        self._rate = ComputeRate()
        self._told_rate = 0.0
        # Requests whose whole block table is in this step's commands.
        self._planned_now: set[str] = set()

    def on_new_request(self, request: TransferRequest) -> None:
        if request.transfer is not None:
            self._entries[request.request_id] = _Entry(
                transfer=request.transfer,
                num_tokens=request.num_tokens,
                token_hash=token_hash(request.all_token_ids, request.cache_salt, request.lora, request.media),
            )
            if request.transfer.role is TransferRole.PRODUCE:
                self._commands.append(AnnounceSend(request.request_id, request.transfer.transfer_id))

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        entry = self._entries.get(request.request_id)
        if entry is None:
            return 0, False
        if entry.transfer.role is TransferRole.PRODUCE:
            return 0, False
        if entry.begun or num_computed_tokens >= entry.num_tokens:
            return 0, False
        entry.local_tokens = num_computed_tokens
        return entry.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        if entry.transfer.role is TransferRole.PRODUCE:
            self._plan_send(request, entry, block_ids)
        elif num_external_tokens > 0 and not entry.begun:
            self._begin_receive(request, entry, block_ids)

    def _plan_send(self, request: TransferRequest, entry: _Entry, block_ids: BlockIds) -> None:
        request_id = request.request_id
        entry.begun = True
        # Another request may compute blocks that the prefix cache found for this one in this very step, and
        # another connector may be loading some: no token counts as computed before the step is over.
        entry.computed = request.num_computed_tokens
        self._planned_now.add(request_id)
        self._commands.append(
            PlanSend(
                request_id,
                entry.transfer.transfer_id,
                entry.transfer.peer,
                entry.num_tokens,
                entry.token_hash,
                _copied(block_ids),
                request.when_idle,
            )
        )

    def _begin_receive(self, request: TransferRequest, entry: _Entry, block_ids: BlockIds) -> None:
        entry.begun = True
        first = entry.local_tokens // self._block_size
        total = -(-entry.num_tokens // self._block_size)
        firsts = [first for _ in block_ids]
        tables = [list(ids[first:total]) for ids in block_ids]
        if self._state_blocks:
            firsts[-1], tables[-1] = 0, list(block_ids[-1])
        self._commands.append(
            BeginReceive(
                request.request_id,
                entry.transfer.transfer_id,
                entry.transfer.peer,
                entry.num_tokens,
                entry.local_tokens,
                entry.token_hash,
                firsts,
                tables,
                request.when_idle,
            )
        )

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        plan = StepCommands(
            preempted=[request_id for request_id in step.preempted_req_ids if self._is_sending(request_id)],
            before_forward=self._commands,
        )
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            entry = self._entries.get(request_id)
            if entry is None or not self._is_sending(request_id):
                continue
            if entry.computed >= entry.num_tokens:
                entry.overran = True
                continue
            if request_id not in self._planned_now:
                new = step.new_block_ids(request_id)
                if any(new):
                    plan.before_forward.append(ExtendSend(request_id, _copied(new)))
            entry.computed += num_tokens
            plan.computed[request_id] = entry.computed
            plan.num_tokens += num_tokens
        self._commands = []
        self._planned_now = set()
        self._tell_rate(plan)
        return plan

    def step_took(self, num_prompt_tokens: int, seconds: float) -> None:
        self._rate.took(num_prompt_tokens, seconds)

    def _tell_rate(self, plan: StepCommands) -> None:
        """Adds our compute rate if it has changed by a tenth. No step is made for it alone."""
        rate = self._rate.tokens_per_s
        if rate is not None and not 0.9 < self._told_rate / rate < 1.1:
            self._told_rate = rate
            plan.before_forward.append(ComputesAt(rate))

    def _is_sending(self, request_id: str) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.begun and entry.transfer.role is TransferRole.PRODUCE

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for request_id in (*output.finished_recving, *output.failed_recving):
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.done = True

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return False
        if entry.transfer.role is TransferRole.PRODUCE:
            return self._finish_send(request, entry, block_ids)
        if not entry.begun:
            self._commands.append(DeclineTransfer(entry.transfer.transfer_id, entry.transfer.peer))
            return False
        if entry.done:
            return False
        self._commands.append(CancelReceive(request.request_id))
        return True

    def _finish_send(self, request: TransferRequest, entry: _Entry, block_ids: BlockIds) -> bool:
        has_first_token = entry.begun and request.num_tokens > entry.num_tokens
        # The prompt's keys and values stay as they are. Recurrent states do not: a later token's are not handed over.
        is_stale = self._state_blocks > 0 and (entry.overran or request.num_computed_tokens != entry.num_tokens)
        if has_first_token and not is_stale:
            first_token = request.all_token_ids[entry.num_tokens]
            self._commands.append(FinishSend(request.request_id, first_token, _copied(block_ids)))
            return True
        self._commands.append(AbandonSend(request.request_id, entry.transfer.transfer_id, kept=entry.begun))
        return entry.begun

    def found_wrong(self, peer: PeerAddress) -> None:
        self._commands.append(FoundWrong(peer))

    def call_back(self, request: TransferRequest) -> None:
        transfer = request.transfer
        if transfer is not None and transfer.role is TransferRole.PRODUCE:
            self._commands.append(CallBackSend(request.request_id))

    def reset_cache(self) -> None:
        self._commands.append(BeginGeneration())

    def forget_after(self, request: TransferRequest, num_tokens: int) -> None:
        """What a producer has sent of the request, or is about to send, is wrong. Its blocks stay its own until the protocol lets go
        of them."""
        transfer = request.transfer
        if transfer is not None and transfer.role is TransferRole.PRODUCE:
            self._commands.append(VoidSend(request.request_id))

    def has_pending_work(self) -> bool:
        return bool(self._commands)


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What the protocol of a node needs of its process, its machine and its network. A simulation brings its own."""

    clock: Clock = time.monotonic
    process: Callable[[], ProcessIdentity] = this_process
    has_ended: Callable[[ProcessIdentity], bool] = has_ended
    loop: type[ProtocolLoop] = ProtocolLoop
    channel: Callable[[str, str, Callable[[HandoffMessage], None]], Channel] = SideChannel


class WorkerHalf(WorkerConnector):
    """No method waits. Commands go to the protocol's thread, and `get_finished` collects its outcomes."""

    def __init__(
        self,
        context: ConnectorContext,
        transport: Transport,
        direction: Direction,
        options: ProtocolOptions | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._surroundings = surroundings = surroundings or Surroundings()
        self._clock = clock = surroundings.clock
        self._context = context
        self._transport = transport
        self._direction = direction
        self._settings = ProtocolSettings.from_config(context.config)
        self._layerwise_tokens = (options or ProtocolOptions()).layerwise_tokens
        self._recorder = Recorder(clock)
        self._lock = threading.Lock()
        self._output = ConnectorOutput()
        self._plan = StepCommands()
        self._memory: KVCacheMemory | None = None
        self._layers_sent = range(0)
        self._closed = False
        self._loop = surroundings.loop(f"{context.node_id}-transfers", self._settings, clock, on_failure=context.wake)
        # Opened here, so that the address is known before the model is; the loop answers once it runs.
        self._channel = surroundings.channel(context.host, f"{context.node_id}-handoff", self._loop.message)

    @property
    def hands_over_states(self) -> bool:
        return True

    @property
    def layerwise(self) -> bool:
        """True in a step that computes enough tokens of requests that are being sent."""
        return bool(self._layers_sent) and 0 < self._layerwise_tokens <= self._plan.num_tokens

    def save_kv_layer(self, layer: int) -> None:
        done = layer + 1
        if done in self._layers_sent:
            self._loop.command([LayersComputed(dict(self._plan.computed), done, self._fence())])

    def _layers_to_send(self, memory: KVCacheMemory) -> range:
        """Returns the numbers of finished layers after which a write is posted. None if several groups share a block's
        slots: then a layer's number does not say where its bytes are."""
        num_layers = memory.all_slots
        if self._direction is Direction.PULL or memory.num_groups > 1 or num_layers != memory.num_layers:
            return range(0)
        stride = -(-num_layers // self._settings.layerwise_posts)
        # The last layers go when the forward pass ends, which follows at once.
        return range(stride, num_layers, stride)

    @property
    def peer_endpoint(self) -> str:
        return self._channel.endpoint

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        self._memory = memory
        self._layers_sent = self._layers_to_send(memory)
        context = self._context
        reachable = self._transport.register(memory)
        side = NodeSide(
            Identity(context.node_id, context.epoch, self._channel.endpoint),
            PoolGeometry.of(memory, reachable, f"{self._transport.name}/{self._direction.value}"),
            self._direction,
            self._transport,
            self._settings,
            send=self._channel.send,
            forget=self._channel.forget,
            clock=self._clock,
            recorder=self._recorder,
            process=self._surroundings.process(),
            checksums=CacheChecksums(self._transport.as_peers_see(memory), self._transport.sums_elsewhere),
            checksum_policy=context.config.checksums,
            sources=context.sources,
        )
        endpoint = TransferEndpoint(
            side,
            listener=self._channel.listener,
            has_ended=self._surroundings.has_ended,
            outcomes=Outcomes(
                self._finished_sending,
                self._unwanted_sending,
                self._finished_recving,
                self._failed_recving,
                self._distrust,
                self._released_blocks,
            ),
        )
        self._loop.start(endpoint)

    # ── called by the engine, once per step ──

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        if not isinstance(metadata, StepCommands):
            raise InternalError(f"metadata of another connector: {type(metadata).__name__}")
        self._plan = metadata

    def handle_preemptions(self) -> None:
        """Does not wait. A write that was in flight when the blocks were taken counts as not written, and its grains
        are written again when the request has been computed again."""
        if self._plan.preempted:
            self._loop.command([PreemptedRequests(self._plan.preempted, self._clock())])

    def start_load_kv(self) -> None:
        if self._plan.before_forward:
            self._loop.command(self._plan.before_forward)

    def wait_for_save(self) -> None:
        """Does not wait either: the blocks keep their content until `finished_sending`, or are preempted."""
        if self._plan.computed:
            self._loop.command([ComputedTokens(self._plan.computed, self._clock(), self._fence())])
        self._plan = StepCommands()

    def _fence(self) -> Fence | None:
        """Returns what says that the device has done the forward pass, which has only been queued by then."""
        event = fence_after(self._memory.tensor) if self._memory is not None else None
        return event.query if event is not None else None

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        if self._loop.failure is not None:
            raise InternalError("the KV transfer thread died") from self._loop.failure
        if self._channel.died is not None:
            raise InternalError(f"the thread that hears this node's peers has died: {self._channel.died}")
        with self._lock:
            output, self._output = self._output, ConnectorOutput()
        return output

    # ── called by the protocol's thread ──

    def _finished_sending(self, request_id: str) -> None:
        with self._lock:
            self._output.finished_sending.add(request_id)
        self._context.wake()

    def _unwanted_sending(self, request_id: str) -> None:
        with self._lock:
            self._output.unwanted_sending.add(request_id)
        self._context.wake()

    def _finished_recving(self, request_id: str, handoff: Handoff) -> None:
        with self._lock:
            self._output.finished_recving[request_id] = handoff
        self._context.wake()

    def _failed_recving(self, request_id: str, failure: LoadFailure) -> None:
        with self._lock:
            self._output.failed_recving[request_id] = failure
        self._context.wake()

    def _distrust(self, reason: str) -> None:
        with self._lock:
            self._output.distrusted = reason
        self._context.wake()

    def _released_blocks(self, blocks: frozenset[int]) -> None:
        with self._lock:
            self._output.released_blocks |= blocks
        self._context.wake()

    # ── any thread ──

    def stats(self) -> TransferStats:
        return self._recorder.snapshot(self._channel.malformed + self._transport.malformed_frames)

    def trace_of(self, request_id: str) -> TransferTrace | None:
        return self._recorder.take_trace(request_id)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.stop(STOP_GRACE_S)
        try:
            self._transport.close()
        finally:
            # Last, because peers take an address where nothing listens for a node that no longer writes.
            self._channel.close()
