"""Bugs in tiers, and in what distrusts KV, as `mutants` has those of handoffs. They run in schedules where tiers are, or where KV becomes
wrong: in the others nothing differs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import xxhash

from tandem.engine.scheduling.lifecycle import Lifecycle
from tandem.engine.scheduling.pins.pins import Pins
from tandem.kvtransfer.offload.cpu import CopyThread
from tandem.kvtransfer.offload.disk import _CHECKSUM_BYTES, _HEADER, HEADER_BYTES, SlotFile, _checked
from tandem.kvtransfer.offload.exchange import Exchange
from tandem.kvtransfer.offload.jobs import Load, Store
from tandem.kvtransfer.offload.lending import ChunkLender
from tandem.kvtransfer.offload.manager import SlotManager, StoreRoom
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.kvtransfer.offload.sharing import TierSharing
from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.endpoint import TransferEndpoint
from tandem.kvtransfer.protocol.generations import SourceGenerations
from tandem.kvtransfer.protocol.producer import Producer
from tandem.kvtransfer.protocol.side import key_of
from tandem.kvtransfer.sources import TierSources
from tests.world import adapters, background, images
from tests.world.feature_mutants import FEATURE_NEEDS
from tests.world.features import Features, has_states
from tests.world.schedule import is_late, is_partitioned
from tests.world.sharing import Sharing
from tests.world.storage import tiers_of
from tests.world.wrong_kv import happens_in

Patch = tuple[type, str, Callable[[Any], Any]]


def can_differ(name: str, seed: int) -> bool:
    """Whether the schedule has what the mutant needs: tiers, a disk, shared tiers, KV that becomes wrong, a partition, images ..."""
    needs, tiers = (NEEDS | FEATURE_NEEDS).get(name, "tiers" if name in TIER_MUTANTS else ""), tiers_of(seed)
    return (
        (tiers.exist or "tiers" not in needs)
        and (Features(seed).has_jobs or "jobs" not in needs)
        and (tiers.disk_slots > 0 or "disk" not in needs)
        and (Sharing(seed, bool(tiers.cpu_slots)).exists or "shared" not in needs)
        and (happens_in(seed) or "wrong" not in needs)
        and (is_partitioned(seed) or "partition" not in needs)
        and (is_late(seed) or "late" not in needs)
        and (background.happens_in(seed) or "background" not in needs)
        and (adapters.happen_in(seed) or "adapters" not in needs)
        and (images.happen_in(seed) or "images" not in needs)
        and (has_states(seed) or "states" not in needs)
    )


def _tier_keeps_what_is_distrusted(right: Any) -> Any:
    return lambda self: None


def _disk_keeps_what_is_distrusted(right: Any) -> Any:
    def header(self: SlotFile, slot: int) -> Any:
        raw = self._file.read(_HEADER.size + _CHECKSUM_BYTES, self._start(slot))
        if (content := _checked(raw, _HEADER, slot + 1)) is None:
            return None
        _, _, when, length, key, checksum = content
        return when, key[:length], checksum

    return header


def _generation_not_told(right: Any) -> Any:
    def execute(self: TransferEndpoint, command: commands.Command) -> None:
        if not isinstance(command, commands.BeginGeneration):
            right(self, command)

    return execute


def _generation_not_heard(right: Any) -> Any:
    return lambda self, envelope: None


def _accusation_not_sent(right: Any) -> Any:
    return lambda self, peer: None


def _in_flight_not_void(right: Any) -> Any:
    return lambda self, sending: None


def _distrusted_is_cached(right: Any) -> Any:
    def begin(self: Lifecycle) -> None:
        right(self)
        for request in self._state.requests.values():
            request.is_distrusted = False

    return begin


def _found_while_written(right: Any) -> Any:
    return lambda self, keys: sum(1 for _ in itertools.takewhile(lambda key: self.policy.get(key) is not None, keys))


def _loaded_while_written(right: Any) -> Any:
    """What goes with `_found_while_written`."""

    def prepare(self: SlotManager, keys: Any) -> list[int]:
        slots: list[int] = [self.policy.get(key) for key in keys]
        for slot in slots:
            self.busy[slot] += self.busy[slot] >= 0
        return slots

    return prepare


def _let_go_while_written(right: Any) -> Any:
    return lambda self, slots: right(self, [slot for slot in slots if self.busy[slot] > 0])


def _torn_chunk_read(right: Any) -> Any:
    def read(self: SlotFile, slot: int, key: bytes, into: memoryview) -> bool:
        header = self._header(slot)
        if header is None or header[1] != key:
            return False
        return self._file.read_into(into, self._start(slot) + HEADER_BYTES) == into.nbytes

    return read


def _old_key_read(right: Any) -> Any:
    def read(self: SlotFile, slot: int, key: bytes, into: memoryview) -> bool:
        header = self._header(slot)
        if header is None:
            return False
        count = self._file.read_into(into, self._start(slot) + HEADER_BYTES)
        return count == into.nbytes and xxhash.xxh3_128_digest(into) == header[2]

    return read


def _freed_under(kind: type) -> Callable[[Any], Any]:
    def make(right: Any) -> Any:
        def request_finished(self: TierScheduler, request: Any, block_ids: Any) -> bool:
            kept = bool(right(self, request, block_ids))
            entry = self.entries.get(request.request_id)
            jobs = [self.jobs[job] for job in entry.jobs] if entry is not None else []
            return kept and not any(isinstance(job, kind) for job in jobs)

        return request_finished

    return make


def _preempted_store_not_waited_for(right: Any) -> Any:
    return lambda self, request_id: ()


def _sources_not_kept(right: Any) -> Any:
    return lambda self: None


def _sources_not_awaited(right: Any) -> Any:
    return property(lambda self: "")


def _given_up_load_goes_on(right: Any) -> Any:
    def look(self: CopyThread) -> None:
        current, now = self._current, self._clock()
        right(self)
        if current is not None and self._current is None and current.until <= now:
            current.hold._given_up = False

    return look


def _ended_store_not_booked(right: Any) -> Any:
    def complete(self: SlotManager, room: StoreRoom, *, written: bool) -> None:
        if written:
            right(self, room, written=written)

    return complete


def _load_not_void_after_reset(right: Any) -> Any:
    def reset(self: TierScheduler) -> None:
        right(self)
        for job in self.jobs.values():
            if isinstance(job, Load):
                job.void = False

    return reset


def _header_of_a_later_generation(right: Any) -> Any:
    def write(self: SlotFile, slot: int, key: bytes, chunk: memoryview, resets: int) -> bool:
        return bool(right(self, slot, key, chunk, self._resets))

    return write


def _copies_not_distrusted(right: Any) -> Any:
    return lambda self, envelope: None


def _lent_slot_taken(right: Any) -> Any:
    def answer(self: ChunkLender, ask: Any, *, is_distrusted: bool) -> None:
        right(self, ask, is_distrusted=is_distrusted)
        self._let_go((key_of(ask.envelope), ask.number))

    return answer


def _late_reading_used(right: Any) -> Any:
    return lambda self, reading: right(self, dataclasses.replace(reading, until=float("inf")))


def _ended_under_a_move(right: Any) -> Any:
    def break_(self: Exchange, peer: Any, error: Any) -> None:
        right(self, peer, error)
        for progress in self._open:
            if progress.reading.peer == peer:
                progress.in_flight = 0
        self._broken.discard(peer)

    return break_


def _copied_bytes_not_compared(right: Any) -> Any:
    return lambda self, reading: (0, "")


def _old_generation_copied(right: Any) -> Any:
    def end_reading(self: TierSharing, ended: Any) -> None:
        self.fetches[ended.number].generation = 1 << 60
        right(self, ended)

    return end_reading


def _pin_never_ends(right: Any) -> Any:
    return lambda self: []


TIER_MUTANTS: dict[str, tuple[str, tuple[Patch, ...]]] = {
    "tier-keeps-what-is-distrusted": (
        "a reset empties the device's cache, and not the tiers",
        ((TierScheduler, "reset_cache", _tier_keeps_what_is_distrusted),),
    ),
    "disk-keeps-what-is-distrusted": (
        "what was forgotten is found again after a restart",
        ((SlotFile, "_header", _disk_keeps_what_is_distrusted),),
    ),
    "generation-not-told": (
        "readers go on with a prefix that its owner distrusts",
        ((TransferEndpoint, "execute", _generation_not_told),),
    ),
    "generation-not-heard": (
        "a reader does not compare generations",
        ((SourceGenerations, "hear", _generation_not_heard),),
    ),
    "accusation-not-sent": (
        "a node that finds wrong KV does not tell the one that sent it",
        ((SourceGenerations, "found_wrong", _accusation_not_sent),),
    ),
    "in-flight-not-void": (
        "a handoff of the old generation is accepted after the new one has begun",
        ((Producer, "_void", _in_flight_not_void),),
    ),
    "distrusted-is-cached": (
        "lmdeploy #4917: a running request's old KV is cached again",
        ((Lifecycle, "begin_generation", _distrusted_is_cached),),
    ),
    "loaded-before-it-was-stored": (
        "vLLM PR #47021, in a tier: a slot is read that still has what was there before",
        (
            (SlotManager, "lookup", _found_while_written),
            (SlotManager, "prepare_load", _loaded_while_written),
            (SlotManager, "complete_load", _let_go_while_written),
        ),
    ),
    "torn-chunk-read": ("half of a write is read as a whole", ((SlotFile, "read", _torn_chunk_read),)),
    "old-key-read": ("vLLM #52234: another prompt's KV is taken for this one's", ((SlotFile, "read", _old_key_read),)),
    "freed-under-a-load": (
        "SGLang #24527, in a tier: an aborted request's blocks are used while its load is under way",
        ((TierScheduler, "request_finished", _freed_under(Load)),),
    ),
    "freed-under-a-store": (
        "TensorRT-LLM #12540, in a tier: blocks are used again while a store reads them",
        ((TierScheduler, "request_finished", _freed_under(Store)),),
    ),
    "preempted-store-not-waited-for": (
        "a preempted request's blocks are used again while a store reads them",
        ((TierScheduler, "blocks_given_up", _preempted_store_not_waited_for),),
    ),
    "sources-not-kept": (
        "after a restart no peer is asked about the KV that it gave",
        ((TierSources, "keep", _sources_not_kept),),
    ),
    "sources-not-awaited": (
        "after a restart KV is used before the peers that gave it have confirmed it",
        ((TierSources, "doubt", _sources_not_awaited),),
    ),
    "given-up-load-goes-on": (
        "a load that was given up writes into blocks of others when the disk answers",
        ((CopyThread, "look", _given_up_load_goes_on),),
    ),
    "failed-store-not-booked": (
        "SGLang #18701: what was not stored keeps its place for ever",
        ((SlotManager, "complete_store", _ended_store_not_booked),),
    ),
    "pin-never-ends": ("an agent's blocks are never given back", ((Pins, "overdue", _pin_never_ends),)),
    "load-not-void-after-reset": (
        "a load that was under way at the reset is used",
        ((TierScheduler, "reset_cache", _load_not_void_after_reset),),
    ),
    "header-of-a-later-generation": (
        "a store that was planned before a reset is valid after it",
        ((SlotFile, "write", _header_of_a_later_generation),),
    ),
    "copies-not-distrusted": (
        "nodes go on with what they copied from a tier whose node distrusts it",
        ((TierSharing, "_hear", _copies_not_distrusted),),
    ),
    "lent-slot-taken": ("a chunk is evicted while another node reads it", ((ChunkLender, "answer", _lent_slot_taken),)),
    "late-reading-used": ("a copy that came after its lease is used", ((Exchange, "read", _late_reading_used),)),
    "ended-under-a-move": (
        "vLLM #53095, between tiers: the room of a failed copy is used while a move still writes there",
        ((Exchange, "_break", _ended_under_a_move),),
    ),
    "copied-bytes-not-compared": (
        "a bit that flips between two tiers is in every later answer",
        ((Exchange, "_compared", _copied_bytes_not_compared),),
    ),
    "old-generation-copied": (
        "a copy that was begun before its owner distrusted it is kept",
        ((TierSharing, "_end_reading", _old_generation_copied),),
    ),
}
"""The name, where it was seen, what is patched."""

NEEDS = {
    "silence-is-proof": "partition",
    "late-registration-taken": "late",
    "copies-not-distrusted": "shared, wrong",
    "lent-slot-taken": "shared",
    "late-reading-used": "shared",
    "ended-under-a-move": "shared",
    "copied-bytes-not-compared": "shared",
    "old-generation-copied": "shared, wrong",
    "tier-keeps-what-is-distrusted": "tiers, wrong",
    "disk-keeps-what-is-distrusted": "disk, wrong",
    "generation-not-told": "wrong",
    "generation-not-heard": "wrong",
    "accusation-not-sent": "wrong",
    "in-flight-not-void": "wrong",
    "distrusted-is-cached": "wrong",
    "pin-never-ends": "jobs",
    "torn-chunk-read": "disk",
    "old-key-read": "disk",
    "sources-not-kept": "disk, wrong",
    "sources-not-awaited": "disk, wrong",
    "given-up-load-goes-on": "disk",
    "failed-store-not-booked": "disk",
    "load-not-void-after-reset": "tiers, wrong",
    "header-of-a-later-generation": "disk, wrong",
}
