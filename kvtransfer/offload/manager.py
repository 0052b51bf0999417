"""Says which chunks a tier has, and in which slots. A manager touches no byte: a mover makes the copies that it
plans, and may take its time.

A slot holds one chunk, which is `block_factor` blocks of the device. A slot is free, or being written for its key, or
ready, or ready and read by some loads. Only a ready slot that no load reads can be evicted.
"""

from __future__ import annotations

import abc
import dataclasses
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, cast

from tandem.base.errors import InternalError
from tandem.kvtransfer.config import EvictionPolicy
from tandem.kvtransfer.offload.policies import POLICIES, Key

_WRITTEN_NOW = -1


@dataclasses.dataclass(slots=True)
class StoreRoom:
    """Those of the offered keys that must be written, and their slots."""

    keys: list[Key]
    slots: list[int]


class TierManager(abc.ABC):
    """What a tier keeps, as the connector asks for it. Only one thread may use it."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int: ...

    @property
    @abc.abstractmethod
    def used(self) -> int:
        """The number of slots that are not free."""

    @property
    @abc.abstractmethod
    def evicted(self) -> int:
        """The number of chunks that were evicted since the start."""

    @abc.abstractmethod
    def lookup(self, keys: Iterable[Key]) -> int:
        """Returns how many of these keys are ready, up to the first that is not."""

    def find_out(self, keys: Sequence[Key], compute_s: float) -> bool:
        """Begins to find out how many of these keys the tier has, up to the first that is not ready; `compute_s`: how long
        computing their tokens takes. Returns whether the request should wait. A tier that knows what it has returns False."""
        return False

    def is_finding_out(self, last: Key) -> bool:
        """Whether the answer about keys that end with this one may still come. If not, `lookup` knows what was found."""
        return False

    def is_slower(self, chunks: int, compute_s: float) -> bool:
        """Whether loading so many chunks takes longer than computing them."""
        return False

    @abc.abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """A request with this prefix was admitted. Called once for each admission."""

    @abc.abstractmethod
    def line_up(self, keys: Sequence[Key]) -> None:
        """A request with this prefix has ended: the prefix's end should be evicted before its beginning."""

    @abc.abstractmethod
    def prepare_load(self, keys: Iterable[Key]) -> list[int]:
        """Returns the slots of keys that `lookup` has counted. The slots keep their content until `complete_load`."""

    @abc.abstractmethod
    def complete_load(self, slots: Iterable[int]) -> None: ...

    @abc.abstractmethod
    def prepare_store(self, keys: Sequence[Key]) -> StoreRoom | None:
        """Makes room for those keys that the tier lacks; the caller completes each. Returns None, and changes
        nothing, if there is not enough room."""

    @abc.abstractmethod
    def complete_store(self, room: StoreRoom, *, written: bool) -> None: ...

    def lost(self, keys: Iterable[Key]) -> None:
        """A load of these has failed."""
        self.forget(keys)

    @abc.abstractmethod
    def forget(self, keys: Iterable[Key]) -> None:
        """Finds these keys no more, whatever the state of their slots."""

    @property
    def distrusted(self) -> str:
        """Why the engine must begin a new generation of its cache; "" if it need not."""
        return ""

    def note_changes(self) -> None:
        """Begins to keep changes for `take_changes`."""

    def take_changes(self) -> Sequence[tuple[Key, bool]]:
        """Returns the keys that became ready since the last call (True), and those that were ready and are gone
        (False)."""
        return ()

    @abc.abstractmethod
    def reset(self) -> None:
        """Forgets everything."""


class SlotManager(TierManager):
    evicted = 0
    capacity = 0

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.capacity = num_slots
        self.busy = array("i", bytes(4 * num_slots))  # how many loads read each slot, or _WRITTEN_NOW
        self.policy = POLICIES[policy](num_slots, self.busy)
        self._free: list[int] = []
        self._unused = 0  # slots from here on were never taken
        self._forgotten: set[int] = set()  # slots that a copy still uses after their keys were forgotten
        self._changes: list[tuple[Key, bool]] = []
        self._notes_changes = False

    def fill(self, entries: Sequence[tuple[Key, int]]) -> None:
        """Enters what the slots hold from an earlier process, the oldest first. Called once, before anything else."""
        taken = {slot for _, slot in entries}
        self._unused = max(taken, default=-1) + 1
        self._free = [slot for slot in range(self._unused) if slot not in taken]
        for key, slot in entries:
            self.policy.insert(key, slot)

    @property
    def used(self) -> int:
        return self._unused - len(self._free)

    def lookup(self, keys: Iterable[Key]) -> int:
        get, busy, count = self.policy.get, self.busy, 0
        for key in keys:
            slot = get(key)
            if slot is None or busy[slot] < 0:
                break
            count += 1
        return count

    def touch(self, keys: Sequence[Key]) -> None:
        self.policy.touch(keys)

    def line_up(self, keys: Sequence[Key]) -> None:
        self.policy.line_up(keys)

    def prepare_load(self, keys: Iterable[Key]) -> list[int]:
        slots = []
        for key in keys:
            slot = self.policy.get(key)
            if slot is None or self.busy[slot] < 0:
                raise InternalError("a tier was asked to load what it has not got")
            slots.append(slot)
        for slot in slots:
            self.busy[slot] += 1
        return slots

    def complete_load(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self.busy[slot] <= 0:
                raise InternalError(f"slot {slot} of a tier was let go more often than it was taken")
            self.busy[slot] -= 1
            if not self.busy[slot] and slot in self._forgotten:
                self._let_go(slot)

    def prepare_store(self, keys: Sequence[Key]) -> StoreRoom | None:
        get = self.policy.get
        new = [key for key in dict.fromkeys(keys) if get(key) is None]
        missing = len(new) - (self.capacity - self.used)
        if missing > 0:
            victims = self.policy.evict(missing, set(keys))
            if victims is None:
                return None
            self.evicted += len(victims)
            if self._notes_changes:
                self._changes += [(key, False) for key, _ in victims]
            self._free += [slot for _, slot in victims]
        slots = [self._take() for _ in new]
        # The first key is the last to be evicted, because the others are of no use without it.
        for key, slot in zip(reversed(new), reversed(slots), strict=True):
            self.busy[slot] = _WRITTEN_NOW
            self.policy.insert(key, slot)
        return StoreRoom(new, slots)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._unused += 1
        return self._unused - 1

    def complete_store(self, room: StoreRoom, *, written: bool) -> None:
        for key, slot in zip(room.keys, room.slots, strict=True):
            if self.busy[slot] != _WRITTEN_NOW:
                raise InternalError(f"slot {slot} of a tier was not being written")
            self.busy[slot] = 0
            if slot in self._forgotten:
                self._let_go(slot)
            elif not written:
                self.policy.remove(key)
                self._free.append(slot)
            elif self._notes_changes:
                self._changes.append((key, True))

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            slot = self.policy.get(key)
            if slot is None:
                continue
            self.policy.remove(key)
            if self._notes_changes and self.busy[slot] != _WRITTEN_NOW:
                self._changes.append((key, False))
            if self.busy[slot]:
                self._forgotten.add(slot)
            else:
                self._free.append(slot)

    def _is_written(self, slot: int) -> bool:
        """Whether a store is under way to this slot."""
        return self.busy[slot] == _WRITTEN_NOW

    def _let_go(self, slot: int) -> None:
        self._forgotten.remove(slot)
        self._free.append(slot)

    def note_changes(self) -> None:
        self._notes_changes = True

    def take_changes(self) -> Sequence[tuple[Key, bool]]:
        changes = self._changes
        if changes:
            self._changes = []
        return changes

    def reset(self) -> None:
        self.forget(list(self.policy.all_keys()))
        self.policy.clear()

    def check_integrity(self) -> None:
        """Raises InternalError unless every slot is in exactly one place."""
        filed = [slot for key in self.policy.all_keys() if (slot := self.policy.get(key)) is not None]
        places = sorted([*filed, *self._free, *self._forgotten])
        if places != list(range(self._unused)):
            raise InternalError("a slot of a tier is in two places, or in none")
        idle = [slot for slot in (*self._free, *range(self._unused, self.capacity)) if self.busy[slot]]
        if idle or any(not self.busy[slot] for slot in self._forgotten):
            raise InternalError("a free slot of a tier is in use, or a forgotten one is not")


# A key that is counted takes some 150 bytes. The tier would keep no more keys than it has slots, and fewer keys than these say
# little: with blocks of 16 tokens a node reads a million tokens between two that count as one.
LEAST_TRACKED = 64_000


class ReuseFilter:
    """A manager that stores a key only once `threshold` requests had it, because a chunk that comes once is not worth its copy.
    It counts the requests for the last `tracked` keys. All that is not here is the other manager's."""

    def __init__(self, manager: TierManager, threshold: int, tracked: int | None = None) -> None:
        """`tracked`: as many as the tier has slots, and at least LEAST_TRACKED, if it is left out."""
        self._manager = manager
        self._threshold = threshold
        self._tracked = max(LEAST_TRACKED, manager.capacity) if tracked is None else tracked
        self._seen: OrderedDict[Key, int] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def touch(self, keys: Sequence[Key]) -> None:
        seen = self._seen
        for key in keys:
            seen[key] = seen.pop(key, 0) + 1
        while len(seen) > self._tracked:
            seen.popitem(last=False)
        self._manager.touch(keys)

    def prepare_store(self, keys: Sequence[Key]) -> StoreRoom | None:
        seen, threshold = self._seen, self._threshold
        return self._manager.prepare_store([key for key in keys if seen.get(key, 0) >= threshold])

    def reset(self) -> None:
        self._manager.reset()
        self._seen.clear()


def filtered(manager: TierManager, store_threshold: int) -> TierManager:
    """Returns the manager in a ReuseFilter, or as it is if a key is stored the first time that it comes."""
    return cast("TierManager", ReuseFilter(manager, store_threshold)) if store_threshold > 1 else manager
