"""What a prefix is made of in a tier, under which keys, and how much of one is there.

A chunk is filed under its last block's hash, in groups but the first with the group's number after it. Recurrent states after some
tokens are filed under the hash of these: each block of them by its number, and the group's after that.

A prefix is there when every group has its part of it: all chunks where every token is kept, the window before its end
where there is one, and the states after exactly its last token. So what one group lacks shortens it for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from tandem.kvtransfer.base import NULL_BLOCK_ID, BlockGroup, BlockIds, TransferRequest
from tandem.kvtransfer.offload.policies import Key

_NUMBER_BYTES = 2  # of a state's block


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one group's table, and the keys of the chunks that they are in."""

    group: int
    first: int
    end: int
    keys: Sequence[Key]


class Content(Protocol):
    """What says which keys are ready: a tier, or what is known of several."""

    def lookup(self, keys: Iterable[Key]) -> int:
        """How many of these are ready, up to the first that is not."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Together:
    """What a tier has, and what a peer's has."""

    manager: Content
    theirs: Collection[Key]

    def lookup(self, keys: Iterable[Key]) -> int:
        count = 0
        for key in keys:
            if key not in self.theirs and not self.manager.lookup((key,)):
                break
            count += 1
        return count


class Prefixes:
    def __init__(self, groups: Sequence[BlockGroup], block_factor: int) -> None:
        self.block_size = groups[0].block_size
        self._factor = block_factor
        self._whole = [index for index, group in enumerate(groups) if group.keeps_every_token]
        # Sliding windows and chunks: what is read ends with the prefix, and begins where the group says.
        self._windows = {index: group for index, group in enumerate(groups) if group.window}
        self._states = {
            index: group.blocks_per_request for index, group in enumerate(groups) if group.blocks_per_request
        }
        self._num_groups = len(groups)
        self._of_tokens = [index for index in range(len(groups)) if index not in self._states]
        self.group_of_states = next(iter(self._states), None)
        # Otherwise a tier has parts of a prefix here and there, and which of them are of use depends on where it ends.
        self.needs_every_block = not (self._windows or self._states)
        # A window without the states after it is worth nothing: with states they are stored together.
        self.keeps_last_windows = bool(self._windows) and not self._states

    # ── names ──

    def keys(self, request: TransferRequest, group: int, first: int, last: int) -> Sequence[Key]:
        """The keys of the request's chunks from `first` to before `last`."""
        factor = self._factor
        return self._keys_of(request.block_hashes[(first + 1) * factor - 1 : last * factor : factor], group)

    def _keys_of(self, hashes: Sequence[bytes], group: int) -> Sequence[Key]:
        return [block_hash + bytes([group]) for block_hash in hashes] if group else hashes

    def _state_keys(self, request: TransferRequest, group: int, end: int, count: int) -> list[Key]:
        """Those of the first `count` blocks of the states after the request's first `end` blocks."""
        return self._keys_of_state(request.block_hashes[end - 1], group, count)

    def _keys_of_state(self, block_hash: bytes, group: int, count: int) -> list[Key]:
        return [
            block_hash + number.to_bytes(_NUMBER_BYTES, "big") + bytes([group]) for number in range(count)
        ]

    def block_of(self, key: Key) -> tuple[bytes, int] | None:
        """A hash and its group; None for a part of a state. A hash has an even number of bytes, whatever made it."""
        if len(key) % 2 == 0:
            return key, 0
        return None if key[-1] in self._states else (key[:-1], key[-1])

    def all_keys(self, manager: Content, request: TransferRequest) -> Sequence[Key]:
        """In the order in which they are of use: the first chunk of every group, then the second. States have keys where
        they are there: they are kept after few chunks."""
        chunks = len(request.block_hashes) // self._factor
        if len(self._of_tokens) == 1 and not self._states:
            return self.keys(request, self._of_tokens[0], 0, chunks)
        by_group = [self.keys(request, group, 0, chunks) for group in self._of_tokens]
        keys: list[Key] = []
        for chunk in range(chunks):
            keys += [of_group[chunk] for of_group in by_group]
            if self._has_state(manager, request, chunk + 1):
                keys += self.state_keys(request, chunk + 1)
        return keys

    def state_keys(self, request: TransferRequest, end: int) -> list[Key]:
        """Of all that belongs to the states after the request's first `end` blocks."""
        return [
            key
            for group, count in self._states.items()
            for key in self._state_keys(request, group, end, count)
        ]

    # ── what is there ──

    def end_of_prefix(self, manager: Content, request: TransferRequest, first: int, last: int) -> int:
        """Which block comes after the longest prefix that is there, where the device has those before `first`."""
        first_chunk, chunks = first // self._factor, len(request.block_hashes) // self._factor
        end = last
        for group in self._whole:
            found = manager.lookup(self.keys(request, group, first_chunk, chunks))
            end = min((first_chunk + found) * self._factor, end)
        while end > first:
            missing = max(
                (self._missing_in_window(manager, request, group, first, end) for group in self._windows),
                default=-1,
            )
            if missing >= 0:
                end = missing  # all that end between this block and there need it too
            elif self._states and not self._has_state(manager, request, end):
                end -= 1
            else:
                break
        return max(end, first)

    def missing(self, manager: Content, request: TransferRequest, end: int) -> Sequence[Key]:
        """All that comes after the request's first `end` blocks, in the order in which it is of use."""
        return self.all_keys(manager, request)[end // self._factor * len(self._whole) :]

    def _missing_in_window(
        self, manager: Content, request: TransferRequest, group: int, first: int, end: int
    ) -> int:
        """The last of the blocks before `end` that the group has to have and that is not there; -1: none is missing."""
        for block in range(end - 1, max(self._skipped(group, end), first) - 1, -1):
            if not manager.lookup(self.keys(request, group, block, block + 1)):
                return block
        return -1

    def _has_state(self, manager: Content, request: TransferRequest, end: int) -> bool:
        block_hash = request.block_hashes[end - 1]
        return bool(self._states) and all(
            self._has_state_of(manager, block_hash, group) for group in self._states
        )

    def _has_state_of(self, manager: Content, block_hash: bytes, group: int) -> bool:
        """Most places have none, so the first block of one is asked for alone."""
        keys = self._keys_of_state(block_hash, group, self._states[group])
        return bool(manager.lookup(keys[:1])) and manager.lookup(keys) == len(keys)

    def _skipped(self, group: int, end: int) -> int:
        """How many leading blocks of the group nothing reads that comes after block `end`."""
        window = self._windows.get(group)
        return 0 if window is None else max(window.first_read(end * self.block_size), 0) // self.block_size

    # ── what a peer has ──

    def parts_of(self, manager: Content, hashes: Sequence[bytes]) -> list[bytes]:
        """For each group a bit for each of these blocks, as `PrefixFound` has them."""
        return [self._bits_of(manager, hashes, group) for group in range(self._num_groups)]

    def _bits_of(self, manager: Content, hashes: Sequence[bytes], group: int) -> bytes:
        bits = bytearray(-(-len(hashes) // 8))
        if group in self._states:
            ready = [self._has_state_of(manager, block_hash, group) for block_hash in hashes]
        else:
            ready = [manager.lookup((key,)) > 0 for key in self._keys_of(hashes, group)]
        for index, is_ready in enumerate(ready):
            bits[index // 8] |= is_ready << index % 8
        return bytes(bits)

    def named(self, parts: Sequence[bytes], hashes: Sequence[bytes]) -> set[Key]:
        """The keys of what is there by `parts_of`; none where they are not of these blocks."""
        size = -(-len(hashes) // 8)
        if len(parts) != self._num_groups or any(len(bits) != size for bits in parts):
            return set()
        keys: set[Key] = set()
        for group, bits in enumerate(parts):
            there = [block_hash for i, block_hash in enumerate(hashes) if bits[i // 8] >> i % 8 & 1]
            if group in self._states:
                for block_hash in there:
                    keys.update(self._keys_of_state(block_hash, group, self._states[group]))
            else:
                keys.update(self._keys_of(there, group))
        return keys

    def to_copy(
        self, manager: Content, theirs: Collection[Key], request: TransferRequest, first: int, last: int
    ) -> tuple[int, list[Key]]:
        """Where the longest prefix ends whose parts are here or at the peer, and which of them are not here."""
        end = self.end_of_prefix(Together(manager, theirs), request, first, last)
        if end == first:
            return first, []
        parts = self.to_load(request, first, end)
        return end, [key for part in parts for key in part.keys if not manager.lookup((key,))]

    # ── what is copied ──

    def to_load(self, request: TransferRequest, first: int, end: int) -> list[Part]:
        """What the request's blocks from `first` to before `end` are, and the states after them."""
        spans = [(group, first) for group in self._whole]
        spans += [(group, max(self._skipped(group, end), first)) for group in self._windows]
        parts = [
            Part(group, start, end, self.keys(request, group, start // self._factor, -(-end // self._factor)))
            for group, start in spans
        ]
        return parts + self._states_after(request, end)

    def _states_after(self, request: TransferRequest, end: int) -> list[Part]:
        return [
            Part(group, 0, count, self._state_keys(request, group, end, count))
            for group, count in self._states.items()
        ]

    def to_store(self, request: TransferRequest, first: int, full: int) -> list[Part]:
        """The chunks from `first` to before `full` of the groups that keep every token."""
        factor = self._factor
        return [
            Part(group, first * factor, full * factor, self.keys(request, group, first, full))
            for group in self._whole
        ]

    def checkpoint(self, request: TransferRequest, tables: BlockIds, end: int) -> list[Part]:
        """What the request will give up of that from which its first `end` blocks are gone on from: windows, and states."""
        windows = self.last_windows(request, tables, end)
        return [self._shortened(part, end) for part in windows] + self._states_after(request, end)

    def new_windows(self, request: TransferRequest, tables: BlockIds, since: int, full: int) -> list[Part]:
        """The blocks from `since` on of what is read by one that goes on after the first `full` blocks."""
        parts = []
        for group in self._windows:
            table, first = tables[group], max(since, self._skipped(group, full))
            while first < full and table[first] == NULL_BLOCK_ID:
                first += 1
            if first < full:
                parts.append(Part(group, first, full, self.keys(request, group, first, full)))
        return parts

    def is_passed(self, group: int, place: int, end: int) -> bool:
        """Whether nothing that goes on after the first `end` blocks reads this block of a window, or state after `place` blocks."""
        return place < (end if group in self._states else self._skipped(group, end))

    def gives_up(self, group: int) -> bool:
        """Whether a request gives up blocks of this group while it runs."""
        return group in self._windows or group in self._states

    def _shortened(self, part: Part, end: int) -> Part:
        first = max(part.first, self._skipped(part.group, end))
        return dataclasses.replace(part, first=first, keys=part.keys[first - part.first :])

    def last_windows(self, request: TransferRequest, tables: BlockIds, full: int) -> list[Part]:
        """What the request still has of the groups with a window."""
        parts = []
        for group in self._windows:
            kept = full - next((i for i in range(full) if tables[group][full - 1 - i] == NULL_BLOCK_ID), full)
            parts.append(Part(group, kept, full, self.keys(request, group, kept, full)))
        return parts

    def num_blocks(self, tables: BlockIds) -> int:
        """For how many blocks of tokens there are tables; none in a model that keeps states alone."""
        return len(tables[self._of_tokens[0]]) if self._of_tokens else 0
