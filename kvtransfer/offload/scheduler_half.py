"""The half that plans: which blocks are stored, and which are loaded into which."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tandem.kvtransfer.base import (
    BlockIds,
    BlockTables,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    LoadFailure,
    ScheduledStep,
    SchedulerConnector,
    TransferRequest,
    WorkerMetadata,
)
from tandem.kvtransfer.offload.manager import StoreRoom
from tandem.kvtransfer.offload.policies import Key
from tandem.kvtransfer.offload.spec import Copy, Tier
from tandem.wire.errors import InternalError

# While a request decodes, its new blocks are stored so many at a time: a step costs the same then, whatever the block size.
# The rest follows when the request ends. What a preempted one has not stored is computed again.
BLOCKS_PER_STORE = 8


@dataclasses.dataclass(slots=True)
class TierPlan(ConnectorMetadata):
    """One step's copies."""

    loads: list[Copy] = dataclasses.field(default_factory=list)
    stores: list[Copy] = dataclasses.field(default_factory=list)  # of blocks that are computed
    stores_after: list[Copy] = dataclasses.field(default_factory=list)  # of blocks that this step computes
    preempted: list[int] = dataclasses.field(default_factory=list)  # jobs whose blocks are free now


@dataclasses.dataclass(slots=True)
class EndedJobs(WorkerMetadata):
    jobs: dict[int, bool]  # whether every byte is right


@dataclasses.dataclass(slots=True)
class _Load:
    request_id: str
    num_tokens: int  # that the request has when it is done
    keys: list[Key]
    slots: list[int]
    void: bool = False  # what it loads is not valid any more


@dataclasses.dataclass(slots=True)
class _Store:
    request_id: str
    room: StoreRoom


@dataclasses.dataclass(slots=True)
class _Entry:
    """A request, until it has ended and none of its blocks is being copied."""

    request: TransferRequest
    cursor: int = 0  # chunks that were offered to the tier since its last admission
    due: int = -1  # the step that looks at it next
    looked: int = -1  # the step that did last
    asked: bool = False  # since it last had no blocks
    ended: bool = False
    jobs: set[int] = dataclasses.field(default_factory=set)


class TierScheduler(SchedulerConnector):
    def __init__(self, block_size: int, tier: Tier) -> None:
        self._block_size = block_size
        self._factor = tier.block_factor
        self._chunk_tokens = block_size * tier.block_factor
        self._chunks_per_store = max(BLOCKS_PER_STORE // tier.block_factor, 1)
        self._tier = tier
        self._tables: BlockTables | None = None
        self._entries: dict[str, _Entry] = {}
        self._jobs: dict[int, _Load | _Store] = {}
        self._loading: set[Key] = set()
        self._numbers = itertools.count()
        self._resets = 0
        self._plan = TierPlan()
        self._carried = False  # the last metadata has stores that begin with the next step
        # Requests to look at, by step: one that decodes fills a chunk in a known number of steps.
        self._step = 0
        self._due: defaultdict[int, list[_Entry]] = defaultdict(list)

    def bind_block_tables(self, tables: BlockTables) -> None:
        self._tables = tables

    def on_new_request(self, request: TransferRequest) -> None:
        self._entries[request.request_id] = _Entry(request)

    # ── loads ──

    def get_num_new_matched_tokens(
        self, request: TransferRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        entry, manager = self._entries[request.request_id], self._tier.manager
        if not entry.asked:
            manager.touch(self._keys(request, 0, len(request.block_hashes) // self._factor))
        first = num_computed_tokens // self._block_size
        # One token is left to compute.
        last = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if request.skip_reading_prefix_cache or first >= last:
            entry.asked = True
            return 0, False
        first_chunk = first // self._factor
        keys = self._keys(request, first_chunk, len(request.block_hashes) // self._factor)
        found = manager.lookup(keys)
        end = min((first_chunk + found) * self._factor, last)
        tokens = max(end - first, 0) * self._block_size
        if not entry.asked:
            entry.asked = True
            self._tier.asked_tokens += (last - first) * self._block_size
            self._tier.found_tokens += tokens
        if not tokens:
            return 0, False
        if not self._loading.isdisjoint(keys[: -(-end // self._factor) - first_chunk]):
            # They are on the device when that load has ended: twice would take twice the blocks.
            return None, False
        return tokens, True

    def _keys(self, request: TransferRequest, first: int, last: int) -> Sequence[Key]:
        """The keys of the request's chunks from `first` to before `last`."""
        factor = self._factor
        return request.block_hashes[(first + 1) * factor - 1 : last * factor : factor]

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        entry = self._entries[request.request_id]
        if num_external_tokens:
            self._load(entry, block_ids, num_external_tokens)
        else:
            entry.cursor = 0
            self._look_at(entry, self._step)

    def _load(self, entry: _Entry, block_ids: BlockIds, num_tokens: int) -> None:
        request, factor = entry.request, self._factor
        first = request.num_computed_tokens // self._block_size
        end = first + num_tokens // self._block_size
        first_chunk, end_chunk = first // factor, -(-end // factor)
        keys = list(self._keys(request, first_chunk, end_chunk))
        slots = self._tier.manager.prepare_load(keys)
        places = [slots[i // factor - first_chunk] * factor + i % factor for i in range(first, end)]
        job = next(self._numbers)
        self._jobs[job] = _Load(request.request_id, end * self._block_size, keys, slots)
        self._loading.update(keys)
        entry.jobs.add(job)
        self._plan.loads.append(Copy(job, block_ids[0][first:end], places, keys, self._resets))

    # ── stores ──

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        plan, self._plan = self._plan, TierPlan()
        for request_id in step.preempted_req_ids:
            if (entry := self._entries.get(request_id)) is not None:
                entry.asked = False
                plan.preempted += entry.jobs
        scheduled = step.num_scheduled_tokens
        due = self._due.pop(self._step, ())
        for entry in due:
            if entry.due == self._step:
                entry.due = -1
                if count := scheduled.get(entry.request.request_id):
                    self._store_full_chunks(entry, count, plan)
        # Prompts advance by more than one token, and so do requests with drafts.
        if scheduled and max(scheduled.values()) > 1:
            for request_id, count in scheduled.items():
                if count == 1:
                    continue
                request_entry = self._entries[request_id]
                if request_entry.looked != self._step:
                    self._store_full_chunks(request_entry, count, plan)
        self._step += 1
        self._carried = bool(plan.stores_after)
        return plan

    def _look_at(self, entry: _Entry, step: int) -> None:
        if entry.due != step:
            entry.due = step
            self._due[step].append(entry)

    def _store_full_chunks(self, entry: _Entry, num_scheduled: int, plan: TierPlan) -> None:
        """Drafts and tokens that are not known yet have no hash, so what holds them is not full."""
        request = entry.request
        entry.looked = self._step
        right = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        full = min(right // self._chunk_tokens, len(request.block_hashes) // self._factor)
        enough = 1 if num_scheduled > 1 else self._chunks_per_store
        if full - entry.cursor >= enough:
            if self._tables is None:
                raise InternalError("a step is planned before the block tables are known")
            table = self._tables.block_ids(request.request_id)[0]
            plan.stores_after += self._store(entry, table, full)
        missing = (entry.cursor + self._chunks_per_store) * self._chunk_tokens - right
        self._look_at(entry, self._step + max(missing, 1))

    def _store(self, entry: _Entry, table: Sequence[int], full: int) -> Iterable[Copy]:
        first, factor = entry.cursor, self._factor
        keys = self._keys(entry.request, first, full)
        room = self._tier.manager.prepare_store(keys)
        if room is None:
            return ()  # all of the tier is being copied; these are offered again
        entry.cursor = full
        if not room.keys:
            return ()
        chunk_of = {key: chunk for chunk, key in enumerate(keys, first)}
        blocks: list[int] = []
        places: list[int] = []
        for key, slot in zip(room.keys, room.slots, strict=True):
            start = chunk_of[key] * factor
            blocks += table[start : start + factor]
            places += range(slot * factor, (slot + 1) * factor)
        job = next(self._numbers)
        self._jobs[job] = _Store(entry.request.request_id, room)
        entry.jobs.add(job)
        return (Copy(job, blocks, places, room.keys, self._resets),)

    # ── ends ──

    def update_connector_output(self, output: ConnectorOutput) -> None:
        ended = output.worker_metadata
        if ended is None:
            return
        if not isinstance(ended, EndedJobs):
            raise InternalError(f"metadata of another connector: {type(ended).__name__}")
        for number, right in ended.jobs.items():
            job = self._jobs.pop(number)
            entry = self._entries[job.request_id]
            entry.jobs.remove(number)
            if isinstance(job, _Store):
                self._tier.manager.complete_store(job.room, written=right)
            else:
                self._end_load(job, right and not job.void, output)
            if entry.ended and not entry.jobs:
                if isinstance(job, _Store):
                    output.finished_sending.add(job.request_id)
                del self._entries[job.request_id]

    def _end_load(self, load: _Load, right: bool, output: ConnectorOutput) -> None:
        self._loading.difference_update(load.keys)
        self._tier.manager.complete_load(load.slots)
        if not right:
            self._tier.manager.forget(load.keys)
        if right:
            output.finished_recving[load.request_id] = Handoff(None, load.num_tokens)
        else:
            output.failed_recving[load.request_id] = LoadFailure(
                f"the {self._tier.spec.name} tier lost it", cached=True
            )

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        entry = self._entries[request.request_id]
        entry.ended, entry.due = True, -1
        right = min(request.num_computed_tokens, request.num_tokens) // self._chunk_tokens
        full = min(right, len(request.block_hashes) // self._factor, len(block_ids[0]) // self._factor)
        loads = any(isinstance(self._jobs[job], _Load) for job in entry.jobs)
        if not loads and full > entry.cursor:
            self._plan.stores += self._store(entry, block_ids[0], full)
        self._tier.manager.line_up(self._keys(request, 0, len(request.block_hashes) // self._factor))
        if entry.jobs:
            return True
        del self._entries[request.request_id]
        return False

    def has_pending_work(self) -> bool:
        return self._carried or bool(self._plan.loads or self._plan.stores)

    def reset_cache(self) -> None:
        self._resets += 1
        self._tier.manager.reset()
        for job in self._jobs.values():
            if isinstance(job, _Load):
                job.void = True
