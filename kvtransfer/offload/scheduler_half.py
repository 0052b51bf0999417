"""The half that plans: which blocks are stored, and which are loaded into which.

A chunk is filed under its last block's hash, in groups but the first with the group's number after it. A prefix is found when
every group that keeps all tokens has all of it, and every group with a window has the window before its end. Blocks
of a window are stored when their request has ended, and its blocks stay its own until they are: before that
the window moves on, and what it has left may be written by others.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tandem.kvtransfer.base import (
    NULL_BLOCK_ID,
    BlockGroup,
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
from tandem.wire.kv_events import BlockRemoved, BlockStored, KVEvent

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
    tokens: int  # that it brings
    began: float
    void: bool = False  # what it loads is not valid any more


@dataclasses.dataclass(slots=True)
class _Store:
    request_id: str
    room: StoreRoom
    offered: Sequence[Key]  # all that is there when it has ended


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Blocks of one group's table, and the keys of the chunks that they are in."""

    group: int
    first: int
    end: int
    keys: Sequence[Key]


@dataclasses.dataclass(slots=True)
class _Entry:
    """A request, until it has ended and none of its blocks is being copied."""

    request: TransferRequest
    cursor: int = 0  # chunks that were offered to the tier since its last admission
    due: int = -1  # the step that looks at it next
    looked: int = -1  # the step that did last
    asked: bool = False  # since it last had no blocks
    counted: bool = False  # what was found, since then
    fetched: bool = False  # or begun to be, from another node
    ended: bool = False
    jobs: set[int] = dataclasses.field(default_factory=set)


class TierScheduler(SchedulerConnector):
    def __init__(self, groups: Sequence[BlockGroup], tier: Tier) -> None:
        self._block_size = groups[0].block_size
        self._factor = tier.block_factor
        self._chunk_tokens = self._block_size * tier.block_factor
        self._chunks_per_store = max(BLOCKS_PER_STORE // tier.block_factor, 1)
        self._whole = [index for index, group in enumerate(groups) if group.keeps_every_token]
        self._windows = [(index, group.window) for index, group in enumerate(groups) if group.window]
        self._names_groups = len(groups) > 1
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
        if self._tier.sharing is not None:
            self._tier.sharing.turn()
        if not entry.asked:
            entry.asked = True
            manager.touch(self._all_keys(request))
        first = num_computed_tokens // self._block_size
        # One token is left to compute.
        last = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if request.skip_reading_prefix_cache or first >= last:
            return 0, False
        end = self._end_of_prefix(request, first, last)
        if end < last and self._fetches(entry, end):
            return None, False
        tokens = (end - first) * self._block_size
        if not entry.counted:
            entry.counted = True
            self._tier.asked_tokens += (last - first) * self._block_size
            self._tier.found_tokens += tokens
        if not tokens:
            return 0, False
        wanted = (key for part in self._parts(request, first, end) for key in part.keys)
        if not self._loading.isdisjoint(wanted):
            # They are on the device when that load has ended: twice would take twice the blocks.
            return None, False
        return tokens, True

    def _fetches(self, entry: _Entry, end: int) -> bool:
        """Whether the request waits, because chunks after those before block `end` are copied here from another node."""
        sharing, request = self._tier.sharing, entry.request
        if sharing is None:
            return False
        if not entry.fetched:
            entry.fetched = True
            groups = len(self._whole)
            missing = self._all_keys(request)[end // self._factor * groups :]
            return bool(missing) and sharing.begin_fetch(request, missing)
        return sharing.is_fetching(request.request_id)

    def _end_of_prefix(self, request: TransferRequest, first: int, last: int) -> int:
        """Which block comes after the longest prefix that is there, where the device has those before `first`."""
        first_chunk, chunks = first // self._factor, len(request.block_hashes) // self._factor
        end = last
        for group in self._whole:
            found = self._tier.manager.lookup(self._keys(request, group, first_chunk, chunks))
            end = min((first_chunk + found) * self._factor, end)
        while end > first:
            missing = max(
                (self._missing_in_window(request, group, first, end) for group, _ in self._windows),
                default=-1,
            )
            if missing < 0:
                break
            end = missing  # a window that ends later needs it too
        return max(end, first)

    def _missing_in_window(self, request: TransferRequest, group: int, first: int, end: int) -> int:
        """The last of the blocks before `end` that the group has to have and that is not there; -1: none is missing."""
        for block in range(end - 1, max(self._skipped(group, end), first) - 1, -1):
            if not self._tier.manager.lookup(self._keys(request, group, block, block + 1)):
                return block
        return -1

    def _skipped(self, group: int, end: int) -> int:
        """How many leading blocks of the group nothing reads that comes after block `end`."""
        window = dict(self._windows).get(group)
        return 0 if window is None else max(end * self._block_size - window + 1, 0) // self._block_size

    def _keys(self, request: TransferRequest, group: int, first: int, last: int) -> Sequence[Key]:
        """The keys of the request's chunks from `first` to before `last`."""
        factor = self._factor
        hashes = request.block_hashes[(first + 1) * factor - 1 : last * factor : factor]
        return [_key_of(block_hash, group) for block_hash in hashes] if group else hashes

    def _all_keys(self, request: TransferRequest) -> Sequence[Key]:
        """In the order in which they are of use: the first chunk of every group, then the second."""
        chunks = len(request.block_hashes) // self._factor
        keys = self._keys(request, 0, 0, chunks)
        groups = len(self._whole) + len(self._windows)
        if groups == 1:
            return keys
        by_group = [self._keys(request, group, 0, chunks) for group in range(groups)]
        return [key for chunk in zip(*by_group, strict=True) for key in chunk]

    def _parts(self, request: TransferRequest, first: int, end: int) -> list[_Part]:
        """What is to be loaded when the request's blocks from `first` to before `end` are."""
        spans = [(group, first) for group in self._whole]
        spans += [(group, max(self._skipped(group, end), first)) for group, _ in self._windows]
        return [
            _Part(
                group, start, end, self._keys(request, group, start // self._factor, -(-end // self._factor))
            )
            for group, start in spans
        ]

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
        parts = self._parts(request, first, end)
        keys = [key for part in parts for key in part.keys]
        slots = self._tier.manager.prepare_load(keys)
        blocks: list[int] = []
        places: list[int] = []
        of_part = iter(slots)
        for part in parts:
            chunk_slots = list(itertools.islice(of_part, len(part.keys)))
            first_chunk = part.first // factor
            blocks += block_ids[part.group][part.first : end]
            places += [
                chunk_slots[i // factor - first_chunk] * factor + i % factor for i in range(part.first, end)
            ]
        job = next(self._numbers)
        self._jobs[job] = _Load(
            request.request_id, end * self._block_size, keys, slots, num_tokens, time.monotonic()
        )
        self._loading.update(keys)
        entry.jobs.add(job)
        self._plan.loads.append(Copy(job, blocks, places, keys, self._resets))

    # ── stores ──

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        plan, self._plan = self._plan, TierPlan()
        scheduled = step.num_scheduled_tokens
        if self._tier.sharing is not None:
            self._tier.sharing.turn()
            self._tier.sharing.planned(sum(count for count in scheduled.values() if count > 1))
        for request_id in step.preempted_req_ids:
            if (entry := self._entries.get(request_id)) is not None:
                entry.asked = entry.counted = entry.fetched = False
                plan.preempted += entry.jobs
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
        # What a mirror has not got yet is computed again when this node dies.
        is_mirrored = self._tier.sharing is not None and self._tier.sharing.has_mirror(request)
        at_once = 1 if is_mirrored else self._chunks_per_store
        enough = 1 if num_scheduled > 1 else at_once
        if full - entry.cursor >= enough:
            if self._tables is None:
                raise InternalError("a step is planned before the block tables are known")
            tables = self._tables.block_ids(request.request_id)
            plan.stores_after += self._store(entry, self._full_chunks(entry, full), tables, full)
        missing = (entry.cursor + at_once) * self._chunk_tokens - right
        self._look_at(entry, self._step + max(missing, 1))

    def _full_chunks(self, entry: _Entry, full: int) -> list[_Part]:
        """What was not offered yet of the groups that keep every token."""
        first, factor = entry.cursor, self._factor
        return [
            _Part(group, first * factor, full * factor, self._keys(entry.request, group, first, full))
            for group in self._whole
        ]

    def _last_windows(self, entry: _Entry, tables: BlockIds, full: int) -> list[_Part]:
        """What the request still has of the groups with a window."""
        parts = []
        for group, _ in self._windows:
            kept = full - next((i for i in range(full) if tables[group][full - 1 - i] == NULL_BLOCK_ID), full)
            parts.append(_Part(group, kept, full, self._keys(entry.request, group, kept, full)))
        return parts

    def _store(self, entry: _Entry, parts: Sequence[_Part], tables: BlockIds, full: int) -> Iterable[Copy]:
        """Offers these to the tier, which has then seen the first `full` chunks of the request."""
        factor = self._factor
        keys = parts[0].keys if len(parts) == 1 else [key for part in parts for key in part.keys]
        room = self._tier.manager.prepare_store(keys)
        if room is None:
            return ()  # all of the tier is being copied; these are offered again
        entry.cursor = full
        if not room.keys:
            self._tell_mirror(entry.request, keys)
            return ()
        place_of = {
            key: (part.group, part.first + chunk * factor)
            for part in parts
            for chunk, key in enumerate(part.keys)
        }
        blocks: list[int] = []
        places: list[int] = []
        for key, slot in zip(room.keys, room.slots, strict=True):
            group, start = place_of[key]
            blocks += tables[group][start : start + factor]
            places += range(slot * factor, (slot + 1) * factor)
        job = next(self._numbers)
        self._jobs[job] = _Store(entry.request.request_id, room, keys)
        entry.jobs.add(job)
        return (Copy(job, blocks, places, room.keys, self._resets),)

    def _tell_mirror(self, request: TransferRequest, keys: Sequence[Key]) -> None:
        if self._tier.sharing is not None:
            self._tier.sharing.stored(request, keys)

    # ── ends ──

    def update_connector_output(self, output: ConnectorOutput) -> None:
        sharing, ended = self._tier.sharing, output.worker_metadata
        if sharing is not None:
            sharing.booked()
        if isinstance(ended, EndedJobs):
            for number, right in ended.jobs.items():
                self._end_job(number, right, output)
        elif ended is not None:
            raise InternalError(f"metadata of another connector: {type(ended).__name__}")
        if sharing is not None:
            sharing.tell_mirrors()

    def _end_job(self, number: int, right: bool, output: ConnectorOutput) -> None:
        job = self._jobs.pop(number)
        entry = self._entries[job.request_id]
        entry.jobs.remove(number)
        if isinstance(job, _Store):
            self._tier.manager.complete_store(job.room, written=right)
            if right and not entry.ended:
                self._tell_mirror(entry.request, job.offered)
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
            self._tier.loaded_tokens += load.tokens
            self._tier.loading_seconds += time.monotonic() - load.began
            output.finished_recving[load.request_id] = Handoff(None, load.num_tokens)
        else:
            output.failed_recving[load.request_id] = LoadFailure(
                f"the {self._tier.spec.name} tier lost it", cached=True
            )

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        entry = self._entries[request.request_id]
        entry.ended, entry.due = True, -1
        if self._tier.sharing is not None:
            self._tier.sharing.stop_waiting(request.request_id)
        right = min(request.num_computed_tokens, request.num_tokens) // self._chunk_tokens
        full = min(right, len(request.block_hashes) // self._factor, len(block_ids[0]) // self._factor)
        loads = any(isinstance(self._jobs[job], _Load) for job in entry.jobs)
        if not loads and full > 0 and (self._windows or full > entry.cursor):
            parts = self._full_chunks(entry, full) + self._last_windows(entry, block_ids, full)
            self._plan.stores += self._store(entry, parts, block_ids, full)
        self._tier.manager.line_up(self._all_keys(request))
        if entry.jobs:
            return True
        del self._entries[request.request_id]
        return False

    def has_pending_work(self) -> bool:
        return self._carried or bool(self._plan.loads or self._plan.stores)

    def note_events(self) -> None:
        self._tier.manager.note_changes()

    def take_events(self) -> Iterable[KVEvent]:
        medium = self._tier.spec.name.upper()
        changes = ((*_block_of(key), is_stored) for key, is_stored in self._tier.manager.take_changes())
        for (group, is_stored), same in itertools.groupby(changes, lambda change: change[1:]):
            hashes = [block_hash for block_hash, *_ in same]
            named = group if self._names_groups else None
            if is_stored:
                yield BlockStored(hashes, None, [], self._chunk_tokens, medium=medium, group_idx=named)
            else:
                yield BlockRemoved(hashes, medium, named)

    def reset_cache(self) -> None:
        self._resets += 1
        if self._tier.sharing is not None:
            self._tier.sharing.forget_all()
        else:
            self._tier.manager.reset()
        for job in self._jobs.values():
            if isinstance(job, _Load):
                job.void = True


def _key_of(block_hash: bytes, group: int) -> Key:
    return block_hash + bytes([group]) if group else block_hash


def _block_of(key: Key) -> tuple[bytes, int]:
    """A hash and its group. A hash has an even number of bytes, whatever made it."""
    return (key[:-1], key[-1]) if len(key) % 2 else (key, 0)
