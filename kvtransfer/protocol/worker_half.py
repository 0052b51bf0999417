"""The half that moves bytes: hands commands to the protocol's thread, and what came of them to the engine."""

from __future__ import annotations

import threading
import time

from tandem.kvtransfer.base import (
    ConnectorContext,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    KVCacheMemory,
    LoadFailure,
    TransferStats,
    WorkerConnector,
)
from tandem.kvtransfer.protocol.cache_map import PoolGeometry
from tandem.kvtransfer.protocol.checksums import CacheChecksums
from tandem.kvtransfer.protocol.commands import (
    ComputedTokens,
    Fence,
    LayersComputed,
    PreemptedRequests,
    StepCommands,
)
from tandem.kvtransfer.protocol.endpoint import Outcomes, ProtocolLoop, SideChannel, TransferEndpoint
from tandem.kvtransfer.protocol.processes import has_ended, this_process
from tandem.kvtransfer.protocol.side import Identity, NodeSide, ProtocolOptions, ProtocolSettings
from tandem.kvtransfer.protocol.statistics import Recorder
from tandem.kvtransfer.protocol.transport import Direction, Transport
from tandem.wire.errors import InternalError
from tandem.wire.tracing import TransferTrace

STOP_GRACE_S = 1.0


class WorkerHalf(WorkerConnector):
    """No method waits: what has to be done is queued, what was done is collected."""

    def __init__(
        self,
        context: ConnectorContext,
        transport: Transport,
        direction: Direction,
        options: ProtocolOptions | None = None,
    ) -> None:
        self._context = context
        self._transport = transport
        self._direction = direction
        self._settings = ProtocolSettings.from_config(context.config)
        self._layerwise_tokens = (options or ProtocolOptions()).layerwise_tokens
        self._recorder = Recorder()
        self._lock = threading.Lock()
        self._output = ConnectorOutput()
        self._plan = StepCommands()
        self._memory: KVCacheMemory | None = None
        self._layers_sent = range(0)
        self._closed = False
        self._loop = ProtocolLoop(
            f"{context.node_id}-transfers", self._settings, time.monotonic, on_failure=context.wake
        )
        # Open from the start, so that the address is known before the model is; the loop answers once it runs.
        self._channel = SideChannel(context.host, f"{context.node_id}-handoff", self._loop.message)

    @property
    def hands_over_states(self) -> bool:
        return True

    @property
    def layerwise(self) -> bool:
        """In a step that computes enough of what is being written."""
        return bool(self._layers_sent) and 0 < self._layerwise_tokens <= self._plan.num_tokens

    def save_kv_layer(self, layer: int) -> None:
        done = layer + 1
        if done in self._layers_sent:
            self._loop.command([LayersComputed(dict(self._plan.computed), done, self._fence())])

    def _layers_to_send(self, memory: KVCacheMemory) -> range:
        """After how many layers those that are done leave. None do where several groups share a block's slots: there a layer's bytes
        are not known by its number."""
        num_layers = memory.all_slots
        if self._direction is Direction.PULL or memory.num_groups > 1 or num_layers != memory.num_layers:
            return range(0)
        stride = -(-num_layers // self._settings.layerwise_posts)
        # The last ones go with the end of the forward pass, which follows at once.
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
            clock=time.monotonic,
            recorder=self._recorder,
            process=this_process(),
            checksums=CacheChecksums(self._transport.as_peers_see(memory), self._transport.sums_elsewhere),
            checksum_policy=context.config.checksums,
        )
        endpoint = TransferEndpoint(
            side,
            listener=self._channel.listener,
            has_ended=has_ended,
            outcomes=Outcomes(
                self._finished_sending,
                self._unwanted_sending,
                self._finished_recving,
                self._failed_recving,
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
        """Does not wait: a write that was under way when its blocks were taken counts as not written, and is
        written again when the request has been computed again."""
        if self._plan.preempted:
            self._loop.command([PreemptedRequests(self._plan.preempted, time.monotonic())])

    def start_load_kv(self) -> None:
        if self._plan.before_forward:
            self._loop.command(self._plan.before_forward)

    def wait_for_save(self) -> None:
        """Does not wait either: the blocks stay as they are until `finished_sending`, or are preempted."""
        if self._plan.computed:
            self._loop.command([ComputedTokens(self._plan.computed, time.monotonic(), self._fence())])
        self._plan = StepCommands()

    def _fence(self) -> Fence | None:
        """On a device the forward pass has only been queued when it returns."""
        if self._memory is None or not self._memory.tensor.is_cuda:
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._memory.tensor.device))
        return event.query

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
            # Last: to a peer an address where nothing listens is a node that writes nothing any more.
            self._channel.close()
