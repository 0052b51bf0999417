"""The scheduler half of a tier: plans which blocks are stored, and which are loaded into which blocks.

`prefixes` says of which parts a prefix consists. Blocks of a window are stored when their request has ended, and the
request keeps them until they are: earlier the window would move on, and others might write to the blocks. Recurrent
states are stored when the scheduler keeps a checkpoint of them, together with the windows before it. Nothing else
uses those blocks meanwhile.

A mirrored answer also has its windows stored as they fill, and checkpoints while it goes on. Those that it has left
behind are forgotten again, here and at the mirror.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from tandem.base.errors import InternalError
from tandem.kvtransfer.base import (
    BlockGroup,
    BlockIds,
    BlockTables,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    LoadFailure,
    ScheduledStep,
    SchedulerConnector,
    TierRoom,
    TransferRequest,
)
from tandem.kvtransfer.offload.jobs import CHECKPOINTS_KEPT, EndedJobs, Entry, Load, Store, TierPlan
from tandem.kvtransfer.offload.patience import LEAST_LOAD_S
from tandem.kvtransfer.offload.policies import Key
from tandem.kvtransfer.offload.prefixes import Part, Prefixes
from tandem.kvtransfer.offload.spec import Copy, Tier
from tandem.wire.kv_events import BlockRemoved, BlockStored, KVEvent

logger = logging.getLogger(__name__)

# While a request decodes, this many new blocks are stored at a time, so that a step costs the same whatever the
# block size. The rest follows when the request ends. A preempted request computes again what was not stored.
BLOCKS_PER_STORE = 8
# What a mirrored request has left behind is forgotten when this many blocks, or `CHECKPOINTS_KEPT` checkpoints, came
# after it. The mirror may not have got further before.
BLOCKS_BEHIND = 8
# A step with fewer prompt tokens than this is mostly fixed cost, and says little about how long computing takes.
LEAST_PROMPT_TOKENS = 64


class TierScheduler(SchedulerConnector):
    def __init__(self, groups: Sequence[BlockGroup], tier: Tier, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.prefixes = Prefixes(groups, tier.block_factor)
        self._block_size = self.prefixes.block_size
        self._factor = tier.block_factor
        self._chunk_tokens = self._block_size * tier.block_factor
        self._chunks_per_store = max(BLOCKS_PER_STORE // tier.block_factor, 1)
        self._names_groups = len(groups) > 1
        self._tier = tier
        self._tables: BlockTables | None = None
        self.entries: dict[str, Entry] = {}
        self.jobs: dict[int, Load | Store] = {}
        self._loading: set[Key] = set()
        # Those of `_loading` whose load has ended since the last step was planned.
        self._loaded: list[Key] = []
        self._numbers = itertools.count()
        self._resets = 0
        self._seconds_per_token = 0.0  # of computing a prompt
        self._plan = TierPlan()
        self._carried = False  # the last metadata has stores that begin with the next step
        # Which requests each step looks at. A decoding request fills a chunk in a known number of steps.
        self._step = 0
        self._due: defaultdict[int, list[Entry]] = defaultdict(list)

    def bind_block_tables(self, tables: BlockTables) -> None:
        self._tables = tables

    def on_new_request(self, request: TransferRequest) -> None:
        self.entries[request.request_id] = Entry(request)

    # ── loads ──

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        entry, manager = self.entries[request.request_id], self._tier.manager
        if self._tier.sharing is not None:
            self._tier.sharing.turn()
        if not entry.asked:
            entry.asked = True
            manager.touch(self.prefixes.all_keys(manager, request))
        first = num_computed_tokens // self._block_size
        # The load leaves one token to compute.
        last = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if request.skip_reading_prefix_cache or first >= last or self._left_out():
            return 0, False
        end = self.prefixes.end_of_prefix(manager, request, first, last)
        if end < last and self._finds_out(entry, end, last):
            return None, False
        end = self.prefixes.end_of_prefix(manager, request, first, last)
        if end < last and self._fetches(entry, first, end, last):
            return None, False
        if end > first and manager.is_slower(-(-(end - first) // self._factor), self._compute_s(end - first)):
            end = first
        tokens = (end - first) * self._block_size
        if not entry.counted:
            entry.counted = True
            self._tier.asked_tokens += (last - first) * self._block_size
            self._tier.found_tokens += tokens
        if not tokens:
            return 0, False
        wanted = (key for part in self.prefixes.to_load(request, first, end) for key in part.keys)
        if not self._loading.isdisjoint(wanted):
            # When that load has ended, the device has its blocks (states one step later). A second load would take as
            # many blocks again.
            return None, False
        return tokens, True

    def _finds_out(self, entry: Entry, end: int, last: int) -> bool:
        """Returns whether the request waits while the tier finds out whether it has more than the first `end` blocks."""
        manager = self._tier.manager
        if not entry.sought:
            entry.sought = True
            keys = self.prefixes.missing(manager, entry.request, end)
            if keys and manager.find_out(keys, self._compute_s(last - end)):
                entry.question = keys[-1]
        if entry.question is not None and not manager.is_finding_out(entry.question):
            entry.question = None
        return entry.question is not None

    def _compute_s(self, blocks: int) -> float:
        """How long this node takes to compute as many blocks of a prompt; for ever, while that is not known."""
        return blocks * self._block_size * self._seconds_per_token or math.inf

    def _fetches(self, entry: Entry, first: int, end: int, last: int) -> bool:
        """Returns whether the request waits while another node's tier is asked for what this one lacks of a prefix
        longer than `end` blocks. The device has the blocks before `first`."""
        sharing, request = self._tier.sharing, entry.request
        if sharing is None:
            return False
        if not entry.fetched:
            entry.fetched = True
            if not self.prefixes.needs_every_block:
                return sharing.ask_for_prefix(request, first, end, last)
            missing = self.prefixes.missing(self._tier.manager, request, end)
            return bool(missing) and sharing.begin_fetch(request, missing)
        return sharing.is_fetching(request.request_id)

    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        entry = self.entries[request.request_id]
        if num_external_tokens:
            self._load(entry, block_ids, num_external_tokens)
        else:
            entry.cursor = entry.windows = 0
            self._look_at(entry, self._step)

    def _load(self, entry: Entry, block_ids: BlockIds, num_tokens: int) -> None:
        request, factor = entry.request, self._factor
        first = request.num_computed_tokens // self._block_size
        end = first + num_tokens // self._block_size
        parts = self.prefixes.to_load(request, first, end)
        keys = [key for part in parts for key in part.keys]
        slots = self._tier.manager.prepare_load(keys)
        blocks: list[int] = []
        places: list[int] = []
        of_part = iter(slots)
        for part in parts:
            chunk_slots = list(itertools.islice(of_part, len(part.keys)))
            first_chunk = part.first // factor
            blocks += block_ids[part.group][part.first : part.end]
            in_part = range(part.first, part.end)
            places += [chunk_slots[i // factor - first_chunk] * factor + i % factor for i in in_part]
        job, now = next(self._numbers), self._clock()
        self.jobs[job] = Load(request.request_id, end * self._block_size, keys, slots, num_tokens, now)
        self._loading.update(keys)
        entry.jobs.add(job)
        within_s = max(LEAST_LOAD_S, num_tokens * self._seconds_per_token)
        self._plan.loads.append(Copy(job, blocks, places, keys, self._resets, within_s))

    def _left_out(self) -> bool:
        """Whether the tier loads and stores nothing now. What an earlier process has left and its sources do not confirm in time is
        forgotten here."""
        if self._tier.recall is not None and self._tier.recall.is_over:
            logger.warning("what the %s tier has is forgotten: %s", self._tier.spec.name, self._tier.recall.doubt)
            self.reset_cache()
        return bool(self._tier.left_out)

    def step_took(self, num_prompt_tokens: int, seconds: float) -> None:
        if num_prompt_tokens >= LEAST_PROMPT_TOKENS:
            self._seconds_per_token = seconds / num_prompt_tokens

    # ── stores ──

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        plan, self._plan = self._plan, TierPlan()
        scheduled = step.num_scheduled_tokens
        if self._tier.sharing is not None:
            self._tier.sharing.turn()
            self._tier.sharing.peers.planned(sum(count for count in scheduled.values() if count > 1))
        for request_id in step.preempted_req_ids:
            if (entry := self.entries.get(request_id)) is not None:
                entry.asked = entry.counted = entry.fetched = entry.sought = False
        due = self._due.pop(self._step, ())
        for entry in due:
            if entry.due == self._step:
                entry.due = -1
                if count := scheduled.get(entry.request.request_id):
                    self._store_full_chunks(entry, count, plan)
        # Prompts advance by more than one token, as do requests with drafts.
        if step.total_num_scheduled_tokens > len(scheduled):
            for request_id, count in scheduled.items():
                if count == 1:
                    continue
                request_entry = self.entries[request_id]
                if request_entry.looked != self._step:
                    self._store_full_chunks(request_entry, count, plan)
        self._loading.difference_update(self._loaded)
        self._loaded.clear()
        self._step += 1
        self._carried = bool(plan.stores_after)
        return plan

    def _look_at(self, entry: Entry, step: int) -> None:
        if entry.due != step:
            entry.due = step
            self._due[step].append(entry)

    def _store_full_chunks(self, entry: Entry, num_scheduled: int, plan: TierPlan) -> None:
        """Offers the chunks that this step fills. Drafts and unknown tokens have no hash, so a block with one of
        them is not full."""
        request = entry.request
        entry.looked = self._step
        right = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        full = min(right // self._chunk_tokens, len(request.block_hashes) // self._factor)
        # If this node dies, tokens that the mirror has not got are computed again. So a mirrored request's chunks are
        # offered one by one.
        is_mirrored = self._tier.sharing is not None and self._tier.sharing.mirrors.follows(request)
        at_once = 1 if is_mirrored else self._chunks_per_store
        enough = 1 if num_scheduled > 1 else at_once
        if full - entry.cursor >= enough:
            if self._tables is None:
                raise InternalError("a step is planned before the block tables are known")
            tables = self._tables.block_ids(request.request_id)
            parts = self.prefixes.to_store(request, entry.cursor, full)
            # A prompt's windows are stored when the request ends: no request continues in the middle of a prompt.
            passing = is_mirrored and self.prefixes.keeps_last_windows and right == request.num_tokens
            if passing:
                parts += self.prefixes.new_windows(request, tables, entry.windows, full)
                copies = self._store(entry, parts, tables, reads=plan, passing=full)
            else:
                copies = self._store(entry, parts, tables)
            if copies is not None:
                entry.cursor = full
                plan.stores_after += copies
                if passing:
                    entry.windows = full
                    self._give_up_passed(entry, full - BLOCKS_BEHIND)
        missing = (entry.cursor + at_once) * self._chunk_tokens - right
        self._look_at(entry, self._step + max(missing, 1))

    def wants_checkpoints(self, request: TransferRequest) -> bool:
        sharing = self._tier.sharing
        has_states = self.prefixes.group_of_states is not None
        return has_states and sharing is not None and sharing.mirrors.follows(request)

    def checkpoint_kept(
        self, request: TransferRequest, num_tokens: int, block_ids: Sequence[int], *, passing: bool = False
    ) -> None:
        """The blocks hold the states once the step has begun. They are copied when it is over."""
        entry, end = self.entries[request.request_id], num_tokens // self._block_size
        group = self.prefixes.group_of_states
        if self._tables is None or group is None:
            raise InternalError("a checkpoint is kept before the block tables are known, or where no states are")
        tables = list(self._tables.block_ids(request.request_id))
        tables[group] = block_ids
        self._tier.manager.touch(self.prefixes.state_keys(request, end))
        parts = self.prefixes.checkpoint(request, tables, end)
        copies = self._store(entry, parts, tables, reads=self._plan, passing=end if passing else None)
        self._plan.stores_after += copies or ()
        if passing and copies is not None:
            entry.checkpoints.append(end)
            if len(entry.checkpoints) == CHECKPOINTS_KEPT:
                self._give_up_passed(entry, entry.checkpoints[0])

    def _give_up_passed(self, entry: Entry, end: int) -> None:
        """Forgets what an answer would read again only if it continued before its first `end` blocks."""
        gone: list[Key] = []
        for group, trail in entry.trail.items():
            while trail and self.prefixes.is_passed(group, trail[0][0], end):
                gone.append(trail.popleft()[1])
        if gone and self._tier.sharing is not None:
            self._tier.manager.forget(gone)
            self._tier.sharing.mirrors.stored(entry.request, (), gone)

    def _store(
        self,
        entry: Entry,
        parts: Sequence[Part],
        tables: BlockIds,
        *,
        reads: TierPlan | None = None,
        passing: int | None = None,
    ) -> list[Copy] | None:
        """Offers these parts to the tier, and returns the copies; None if the tier is left out, or has no room because
        copies use all of it. `reads`: the plan whose `reads` names blocks that the request may give up before they are copied.
        `passing`: the answer has come to this block; it needs these parts no more once it is well beyond it."""
        if entry.request.is_distrusted:
            return []
        if self._left_out():
            return None
        factor = self._factor
        keys = parts[0].keys if len(parts) == 1 else [key for part in parts for key in part.keys]
        room = self._tier.manager.prepare_store(keys)
        if room is None:
            return None
        if not room.keys:
            self._tell_mirror(entry.request, keys)
            return []
        if self._tier.recall is not None:
            self._tier.recall.keep()
        read: list[int] = []
        if len(parts) == 1 and reads is None and len(room.keys) == len(keys):
            # What a step with many answers stores: one run of blocks each, all of it new.
            first = parts[0].first
            blocks = list(tables[parts[0].group][first : first + len(keys) * factor])
            places = room.slots if factor == 1 else _places(room.slots, factor)
        else:
            place_of = {
                key: (part.group, part.first + chunk * factor) for part in parts for chunk, key in enumerate(part.keys)
            }
            blocks, places = [], _places(room.slots, factor)
            states = self.prefixes.group_of_states
            for key in room.keys:
                group, start = place_of[key]
                blocks += tables[group][start : start + factor]
                if reads is not None and self.prefixes.gives_up(group):
                    read += tables[group][start : start + factor]
                    if passing is not None:
                        entry.trail[group].append((passing if group == states else start, key))
        job = next(self._numbers)
        self.jobs[job] = Store(entry.request.request_id, room, keys, read, blocks)
        if reads is not None:
            reads.reads += read
        entry.jobs.add(job)
        return [Copy(job, blocks, places, room.keys, self._resets)]

    def _tell_mirror(self, request: TransferRequest, keys: Sequence[Key]) -> None:
        if keys and self._tier.sharing is not None:
            self._tier.sharing.mirrors.stored(request, keys)

    def blocks_given_up(self, request_id: str) -> Sequence[int]:
        entry, read = self.entries.get(request_id), list[int]()
        for number in entry.jobs if entry is not None else ():
            job = self.jobs[number]
            if isinstance(job, Store) and job.blocks:
                read += job.blocks
                job.reads, job.blocks = [*job.reads, *job.blocks], ()
        return read

    # ── ends ──

    def update_connector_output(self, output: ConnectorOutput) -> None:
        sharing, ended = self._tier.sharing, output.worker_metadata
        if sharing is not None:
            sharing.peers.booked()
        if isinstance(ended, EndedJobs):
            for number, right in ended.jobs.items():
                self._end_job(number, right, output)
        elif ended is not None:
            raise InternalError(f"metadata of another connector: {type(ended).__name__}")
        if sharing is not None:
            sharing.mirrors.tell()
            output.distrusted = output.distrusted or sharing.distrusted
        output.distrusted = output.distrusted or self._tier.manager.distrusted

    def _end_job(self, number: int, right: bool | None, output: ConnectorOutput) -> None:
        job = self.jobs.pop(number)
        entry = self.entries[job.request_id]
        entry.jobs.remove(number)
        if isinstance(job, Store):
            self._tier.manager.complete_store(job.room, written=bool(right))
            output.ended_reads += job.reads
            if right and not entry.ended:
                self._tell_mirror(entry.request, job.offered)
        else:
            self._end_load(job, False if job.void else right, output)
        if entry.ended and not entry.jobs:
            if isinstance(job, Store):
                output.finished_sending.add(job.request_id)
            del self.entries[job.request_id]

    def _end_load(self, load: Load, right: bool | None, output: ConnectorOutput) -> None:
        self._loaded += load.keys
        self._tier.manager.complete_load(load.slots)
        if right is False:
            self._tier.manager.lost(load.keys)
        if right:
            self._tier.loaded_tokens += load.tokens
            self._tier.loading_seconds += self._clock() - load.began
            output.finished_recving[load.request_id] = Handoff(None, load.num_tokens)
        else:
            output.failed_recving[load.request_id] = LoadFailure(
                f"the {self._tier.spec.name} tier {'lost it' if right is False else 'did not load it in time'}",
                cached=True,
            )

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        entry = self.entries[request.request_id]
        entry.ended, entry.due = True, -1
        if self._tier.sharing is not None:
            self._tier.sharing.stop_waiting(request.request_id)
        right = min(request.num_computed_tokens, request.num_tokens) // self._chunk_tokens
        prefixes = self.prefixes
        allocated = prefixes.num_blocks(block_ids) // self._factor
        full = min(right, len(request.block_hashes) // self._factor, allocated)
        loads = any(isinstance(self.jobs[job], Load) for job in entry.jobs)
        if not loads and full > 0 and (prefixes.keeps_last_windows or full > entry.cursor):
            parts = prefixes.to_store(request, entry.cursor, full)
            if prefixes.keeps_last_windows:
                parts += prefixes.last_windows(request, block_ids, full)
            self._plan.stores += self._store(entry, parts, block_ids) or ()
        self._tier.manager.line_up(prefixes.all_keys(self._tier.manager, request))
        if entry.jobs:
            return True
        del self.entries[request.request_id]
        return False

    def has_pending_work(self) -> bool:
        return self._carried or bool(self._plan.loads or self._plan.stores)

    def note_events(self) -> None:
        self._tier.manager.note_changes()

    def take_events(self) -> Iterable[KVEvent]:
        medium = self._tier.spec.name.upper()
        named = ((self.prefixes.block_of(key), is_stored) for key, is_stored in self._tier.manager.take_changes())
        # Events name no states, as the device's do not: they exist where blocks of tokens do.
        changes = ((*block, is_stored) for block, is_stored in named if block is not None)
        for (group, is_stored), same in itertools.groupby(changes, lambda change: change[1:]):
            hashes = [block_hash for block_hash, *_ in same]
            group_idx = group if self._names_groups else None
            if is_stored:
                yield BlockStored(hashes, None, [], self._chunk_tokens, medium=medium, group_idx=group_idx)
            else:
                yield BlockRemoved(hashes, medium, group_idx)

    def tier_rooms(self) -> Sequence[TierRoom]:
        manager, factor = self._tier.manager, self._factor
        return [TierRoom(self._tier.spec.name, manager.used * factor, manager.capacity * factor)]

    def forget_after(self, request: TransferRequest, num_tokens: int) -> None:
        keys = self.prefixes.keys_after(request, num_tokens)
        self._tier.manager.forget(keys)
        if self._tier.sharing is not None:
            self._tier.sharing.mirrors.stored(request, (), keys)
        gone = set(keys)
        for job in self.jobs.values():
            if isinstance(job, Load):
                job.void = job.void or not gone.isdisjoint(job.keys)
            else:
                job.offered = [key for key in job.offered if key not in gone]

    def reset_cache(self) -> None:
        self._resets += 1
        if self._tier.sharing is not None:
            self._tier.sharing.forget_all()
        else:
            self._tier.manager.reset()
        if self._tier.recall is not None:
            self._tier.recall.forgot()
        for job in self.jobs.values():
            if isinstance(job, Load):
                job.void = True

    @property
    def has_forgotten(self) -> bool:
        return self._tier.recall is None or self._tier.recall.all_written


def _places(slots: Sequence[int], factor: int) -> list[int]:
    return [place for slot in slots for place in range(slot * factor, (slot + 1) * factor)]
