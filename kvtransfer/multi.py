"""Combines several connectors into one. The first that can load a request's KV loads it; of several tiers, the one with
the longest prefix does. Each of them is told of everything.

An ended request keeps its blocks until each connector that kept them has let go.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import (
    BlockIds,
    BlockTables,
    ConnectorContext,
    ConnectorMetadata,
    ConnectorOutput,
    KVCacheMemory,
    LoadFailure,
    ScheduledStep,
    SchedulerConnector,
    TierRoom,
    TransferRequest,
    TransferStats,
    WorkerConnector,
    WorkerMetadata,
)
from tandem.kvtransfer.registry import find_connector, find_tiers
from tandem.wire.kv_events import KVEvent
from tandem.wire.nodes import PeerAddress
from tandem.wire.tracing import TransferTrace


@dataclasses.dataclass(slots=True)
class PartsMetadata(ConnectorMetadata):
    parts: list[ConnectorMetadata]

    @property
    def reads(self) -> Sequence[int]:
        return [block for part in self.parts for block in part.reads]


@dataclasses.dataclass(slots=True)
class PartsOutput(WorkerMetadata):
    parts: list[ConnectorOutput]


@dataclasses.dataclass(slots=True)
class _EndedRequest:
    """A request that has ended while some connectors keep its blocks."""

    keepers: set[int]
    failure: LoadFailure | None = None  # of a load that was running when the request ended


class MultiScheduler(SchedulerConnector):
    def __init__(self, parts: Sequence[SchedulerConnector], *, longest: bool = False) -> None:
        """`longest`: the connector that can load most loads, and the first of equals. Else the first that can load."""
        self._parts = list(parts)
        self._longest = longest
        # Which part promised tokens for each request, and whether they arrive later.
        self._loaders: dict[str, tuple[int, bool]] = {}
        self._ended: dict[str, _EndedRequest] = {}

    def bind_block_tables(self, tables: BlockTables) -> None:
        for part in self._parts:
            part.bind_block_tables(tables)

    def on_new_request(self, request: TransferRequest) -> None:
        for part in self._parts:
            part.on_new_request(request)

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._loaders.pop(request.request_id, None)
        most = 0
        for index, part in enumerate(self._parts):
            tokens, later = part.get_num_new_matched_tokens(request, num_computed_tokens)
            if tokens is None:
                return None, False
            if tokens > most:
                most = tokens
                self._loaders[request.request_id] = index, later
                if not self._longest:
                    break
        return most, most > 0 and self._loaders[request.request_id][1]

    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        loader, later = None, False
        if num_external_tokens:
            loader, later = self._loaders.pop(request.request_id)
        for index, part in enumerate(self._parts):
            if index == loader:
                part.update_state_after_alloc(request, block_ids, num_external_tokens)
            elif not later:  # the others hear of the request's blocks when it is admitted
                part.update_state_after_alloc(request, block_ids, 0)

    def wants_checkpoints(self, request: TransferRequest) -> bool:
        return any(part.wants_checkpoints(request) for part in self._parts)

    def checkpoint_kept(
        self, request: TransferRequest, num_tokens: int, block_ids: Sequence[int], *, passing: bool = False
    ) -> None:
        for part in self._parts:
            if not passing or part.wants_checkpoints(request):
                part.checkpoint_kept(request, num_tokens, block_ids, passing=passing)

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        return PartsMetadata([part.build_connector_meta(step) for part in self._parts])

    def update_connector_output(self, output: ConnectorOutput) -> None:
        if output.worker_metadata is None:
            return
        if not isinstance(output.worker_metadata, PartsOutput):
            raise InternalError(f"metadata of another connector: {type(output.worker_metadata).__name__}")
        for index, (part, of_part) in enumerate(zip(self._parts, output.worker_metadata.parts, strict=True)):
            part.update_connector_output(of_part)
            self._add(output, index, of_part)

    def _add(self, output: ConnectorOutput, index: int, of_part: ConnectorOutput) -> None:
        output.invalid_block_ids |= of_part.invalid_block_ids
        output.unwanted_sending |= of_part.unwanted_sending
        output.distrusted = output.distrusted or of_part.distrusted
        output.ended_reads += of_part.ended_reads
        output.released_blocks |= self._not_postponed(of_part.released_blocks)
        for request_id in of_part.finished_sending:
            if self._let_go(output, index, request_id):
                output.finished_sending.add(request_id)
        for request_id, handoff in of_part.finished_recving.items():
            if self._let_go(output, index, request_id):
                output.finished_recving[request_id] = handoff
        for request_id, failure in of_part.failed_recving.items():
            if self._let_go(output, index, request_id, failure):
                output.failed_recving[request_id] = failure

    def _let_go(self, output: ConnectorOutput, index: int, request_id: str, failure: LoadFailure | None = None) -> bool:
        """Part `index` has let go of the request. Returns whether the engine may be told so now, as the part said
        it."""
        ended = self._ended.get(request_id)
        if ended is None:
            return True
        ended.keepers.discard(index)
        ended.failure = failure or ended.failure
        if ended.keepers:
            return False
        del self._ended[request_id]
        if ended.failure is not None:  # the failure may name unsafe blocks
            output.failed_recving[request_id] = ended.failure
            return False
        return True

    def _not_postponed(self, blocks: set[int]) -> set[int]:
        """Returns `blocks` without those whose quarantine has not begun, because another connector still reads them."""
        for ended in self._ended.values():
            if ended.failure is not None and (early := ended.failure.unsafe_blocks & blocks):
                rest = ended.failure.unsafe_blocks - early
                ended.failure = msgspec.structs.replace(ended.failure, unsafe_blocks=rest)
                blocks = blocks - early
        return blocks

    def blocks_given_up(self, request_id: str) -> Sequence[int]:
        return [block for part in self._parts for block in part.blocks_given_up(request_id)]

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        self._loaders.pop(request.request_id, None)
        keepers = {index for index, part in enumerate(self._parts) if part.request_finished(request, block_ids)}
        if keepers:
            self._ended[request.request_id] = _EndedRequest(keepers)
        return bool(keepers)

    def has_pending_work(self) -> bool:
        return any(part.has_pending_work() for part in self._parts)

    def step_took(self, num_prompt_tokens: int, seconds: float) -> None:
        for part in self._parts:
            part.step_took(num_prompt_tokens, seconds)

    def note_events(self) -> None:
        for part in self._parts:
            part.note_events()

    def take_events(self) -> Iterable[KVEvent]:
        return [event for part in self._parts for event in part.take_events()]

    def tier_rooms(self) -> Sequence[TierRoom]:
        return [room for part in self._parts for room in part.tier_rooms()]

    def found_wrong(self, peer: PeerAddress) -> None:
        for part in self._parts:
            part.found_wrong(peer)

    def forget_after(self, request: TransferRequest, num_tokens: int) -> None:
        for part in self._parts:
            part.forget_after(request, num_tokens)

    def call_back(self, request: TransferRequest) -> None:
        for part in self._parts:
            part.call_back(request)

    def reset_cache(self) -> None:
        for part in self._parts:
            part.reset_cache()

    @property
    def has_forgotten(self) -> bool:
        return all(part.has_forgotten for part in self._parts)


class MultiWorker(WorkerConnector):
    def __init__(self, parts: Sequence[WorkerConnector]) -> None:
        self._parts = list(parts)

    @property
    def peer_endpoint(self) -> str:
        return next((endpoint for part in self._parts if (endpoint := part.peer_endpoint)), "")

    @property
    def tier_endpoint(self) -> str:
        return next((endpoint for part in self._parts if (endpoint := part.tier_endpoint)), "")

    @property
    def hands_over_states(self) -> bool:
        return any(part.hands_over_states for part in self._parts)

    @property
    def layerwise(self) -> bool:
        return any(part.layerwise for part in self._parts)

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        for part in self._parts:
            part.register_kv_caches(memory)

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        if not isinstance(metadata, PartsMetadata):
            raise InternalError(f"metadata of another connector: {type(metadata).__name__}")
        for part, of_part in zip(self._parts, metadata.parts, strict=True):
            part.bind_connector_metadata(of_part)

    def handle_preemptions(self) -> None:
        for part in self._parts:
            part.handle_preemptions()

    def start_load_kv(self) -> None:
        for part in self._parts:
            part.start_load_kv()

    def wait_for_layer_load(self, layer: int) -> None:
        for part in self._parts:
            if part.layerwise:
                part.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        for part in self._parts:
            if part.layerwise:
                part.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        for part in self._parts:
            part.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        outputs = [part.get_finished(finished_req_ids) for part in self._parts]
        return ConnectorOutput(worker_metadata=PartsOutput(outputs))

    def stats(self) -> TransferStats:
        return merged_stats([part.stats() for part in self._parts])

    def trace_of(self, request_id: str) -> TransferTrace | None:
        traces = (part.trace_of(request_id) for part in self._parts)
        return next((trace for trace in traces if trace is not None), None)

    def shutdown(self) -> None:
        with contextlib.ExitStack() as parts:
            for part in reversed(self._parts):
                parts.callback(part.shutdown)


def merged_stats(parts: Sequence[TransferStats]) -> TransferStats:
    merged = TransferStats()
    for field in TransferStats.__struct_fields__:
        values = [getattr(part, field) for part in parts]
        if isinstance(values[0], int):
            setattr(merged, field, sum(values))
        elif field == "left_out":  # several parts may have left out one node
            merged.left_out = sorted({node for part in parts for node in part.left_out})
        elif isinstance(values[0], list):
            setattr(merged, field, [item for value in values for item in value])
        elif field == "waits":
            merged.waits = {stage: waits for part in parts for stage, waits in part.waits.items()}
        else:
            setattr(merged, field, _added(values))
    return merged


def _added(tables: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name. Most tables are empty, and every status of a node asks for this."""
    filled = [table for table in tables if table]
    if len(filled) <= 1:
        return dict(filled[0]) if filled else {}
    return dict(sum(map(Counter, filled), Counter()))


def create_connector(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    """Makes what a node needs: a connector for its peers, one for each tier of its cache, or several as one."""
    parts: list[tuple[SchedulerConnector, WorkerConnector]] = []
    if context.has_peers and context.rank_lines and context.config.connector != "nixl":
        raise ConfigurationError(
            f"transfer.connector is {context.config.connector}, and this node's ranks keep their KV apart, which nixl alone hands over: "
            "set transfer.connector to nixl, or tensor_parallel to 1"
        )
    if context.has_peers:
        parts.append(find_connector(context.config.connector)(context))
    if context.tiers:
        tiers = find_tiers()(context)
        parts.append(tiers[0] if len(tiers) == 1 else joined(tiers, longest=True))
    if len(parts) == 1:
        return parts[0]
    return joined(parts, longest=False)


def joined(
    parts: Sequence[tuple[SchedulerConnector, WorkerConnector]], *, longest: bool
) -> tuple[SchedulerConnector, WorkerConnector]:
    """`longest`: see MultiScheduler."""
    planners, movers = zip(*parts, strict=True)
    return MultiScheduler(planners, longest=longest), MultiWorker(movers)
