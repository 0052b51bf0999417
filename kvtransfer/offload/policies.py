"""Chooses what a full tier evicts: the least recently used keys, or those that ARC chooses.

A policy knows keys and their slots. `busy[slot]` says whether a slot's key may be evicted: it counts the loads that
read the slot, and is below 0 while the slot is being written.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from tandem.kvtransfer.config import EvictionPolicy

Key = bytes
Victims = list[tuple[Key, int]]


class CachePolicy(abc.ABC):
    def __init__(self, capacity: int, busy: Sequence[int]) -> None:
        self.capacity = capacity
        self.busy = busy

    @abc.abstractmethod
    def get(self, key: Key) -> int | None:
        """Returns the key's slot, or None."""

    @abc.abstractmethod
    def insert(self, key: Key, slot: int) -> None:
        """Adds a key that is not there, as the most recently used."""

    @abc.abstractmethod
    def remove(self, key: Key) -> None:
        """Removes a key that is there."""

    @abc.abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """A request uses this prefix, whether its keys are there or not. The first key becomes the most recent, because
        the later ones are of no use without it."""

    @abc.abstractmethod
    def line_up(self, keys: Sequence[Key]) -> None:
        """Makes the keys as recent as `touch` does, without counting a use."""

    @abc.abstractmethod
    def evict(self, count: int, protected: Collection[Key]) -> Victims | None:
        """Evicts `count` keys that are neither busy nor protected. Returns None, and changes nothing, if there are too
        few."""

    @abc.abstractmethod
    def all_keys(self) -> Iterator[Key]: ...

    @abc.abstractmethod
    def clear(self) -> None: ...


class LruPolicy(CachePolicy):
    def __init__(self, capacity: int, busy: Sequence[int]) -> None:
        super().__init__(capacity, busy)
        self._slots: OrderedDict[Key, int] = OrderedDict()  # the oldest first

    def get(self, key: Key) -> int | None:
        return self._slots.get(key)

    def insert(self, key: Key, slot: int) -> None:
        self._slots[key] = slot

    def remove(self, key: Key) -> None:
        del self._slots[key]

    def touch(self, keys: Sequence[Key]) -> None:
        slots = self._slots
        for key in reversed(keys):
            if key in slots:
                slots.move_to_end(key)

    def line_up(self, keys: Sequence[Key]) -> None:
        self.touch(keys)

    def evict(self, count: int, protected: Collection[Key]) -> Victims | None:
        if not count:
            return []
        busy, victims = self.busy, []
        for key, slot in self._slots.items():
            if busy[slot] == 0 and key not in protected:
                victims.append((key, slot))
                if len(victims) == count:
                    break
        else:
            return None
        for key, _ in victims:
            del self._slots[key]
        return victims

    def all_keys(self) -> Iterator[Key]:
        return iter(self._slots)

    def clear(self) -> None:
        self._slots.clear()


class ArcPolicy(CachePolicy):
    """Adaptive replacement (Megiddo and Modha, 2003).

    Keys that were used once (`recent`) and keys that were used again (`frequent`) are two lists, so that a long prompt
    which never comes again cannot push out what comes often. Evicted keys are remembered without their data. When one
    comes again, it shows which list was too short, and `target`, the size that `recent` should have, moves.
    """

    def __init__(self, capacity: int, busy: Sequence[int]) -> None:
        super().__init__(capacity, busy)
        self.target = 0.0
        self.recent: OrderedDict[Key, int] = OrderedDict()  # T1
        self.frequent: OrderedDict[Key, int] = OrderedDict()  # T2
        self.gone_recent: OrderedDict[Key, None] = OrderedDict()  # B1
        self.gone_frequent: OrderedDict[Key, None] = OrderedDict()  # B2

    def get(self, key: Key) -> int | None:
        slot = self.recent.get(key)
        return self.frequent.get(key) if slot is None else slot

    def insert(self, key: Key, slot: int) -> None:
        self.recent[key] = slot
        self.gone_recent.pop(key, None)
        self.gone_frequent.pop(key, None)

    def remove(self, key: Key) -> None:
        if self.recent.pop(key, None) is None:
            del self.frequent[key]

    def touch(self, keys: Sequence[Key]) -> None:
        recent, frequent, busy = self.recent, self.frequent, self.busy
        for key in reversed(keys):
            if (slot := recent.get(key)) is not None:
                if busy[slot] < 0:  # it is still being written: this is its first use
                    recent.move_to_end(key)
                else:
                    del recent[key]
                    frequent[key] = slot
            elif key in frequent:
                frequent.move_to_end(key)
            else:
                self._learn(key)

    def _learn(self, key: Key) -> None:
        once, again = self.gone_recent, self.gone_frequent
        if key in once:
            self.target = min(self.target + max(1.0, len(again) / len(once)), self.capacity)
            once.move_to_end(key)
        elif key in again:
            self.target = max(self.target - max(1.0, len(once) / len(again)), 0.0)
            again.move_to_end(key)

    def line_up(self, keys: Sequence[Key]) -> None:
        recent, frequent = self.recent, self.frequent
        for key in reversed(keys):
            if key in recent:
                recent.move_to_end(key)
            elif key in frequent:
                frequent.move_to_end(key)

    def evict(self, count: int, protected: Collection[Key]) -> Victims | None:
        victims: list[tuple[Key, int, bool]] = []
        left = len(self.recent)  # what `recent` will have left when the chosen keys are evicted
        recent, frequent = self._idle(self.recent, protected), self._idle(self.frequent, protected)
        for _ in range(count):
            first_of_recent = left >= int(self.target)
            found = next(recent, None) if first_of_recent else None
            of_recent = found is not None
            if found is None:
                found = next(frequent, None)
            if found is None:
                found = next(recent, None)
                of_recent = True
            if found is None:
                return None
            left -= of_recent
            victims.append((*found, of_recent))
        for key, _, of_recent in victims:
            if of_recent:
                del self.recent[key]
                self.gone_recent[key] = None
            else:
                del self.frequent[key]
                self.gone_frequent[key] = None
        for gone in (self.gone_recent, self.gone_frequent):
            while len(gone) > self.capacity:
                gone.popitem(last=False)
        return [(key, slot) for key, slot, _ in victims]

    def _idle(self, slots: OrderedDict[Key, int], protected: Collection[Key]) -> Iterator[tuple[Key, int]]:
        busy = self.busy
        return ((key, slot) for key, slot in slots.items() if busy[slot] == 0 and key not in protected)

    def all_keys(self) -> Iterator[Key]:
        yield from self.recent
        yield from self.frequent

    def clear(self) -> None:
        for entries in (self.recent, self.frequent, self.gone_recent, self.gone_frequent):
            entries.clear()
        self.target = 0.0


POLICIES: dict[EvictionPolicy, type[CachePolicy]] = {EvictionPolicy.LRU: LruPolicy, EvictionPolicy.ARC: ArcPolicy}
