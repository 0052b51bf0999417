"""Says of which parts a prefix consists in a tier, under which keys they are, and how much of a prefix a tier has.

A chunk's key is its last block's hash; in groups after the first, the group's number follows. Recurrent states after
some tokens are filed under the hash of these tokens: each block of the states under the hash, the block's number and
the group's number.

A tier has a prefix if it has every group's part of it: all chunks for a group that keeps every token, the window before
the prefix's end for a group with a window, and the states after exactly its last token. So a part that one group lacks
shortens the prefix for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from tandem.kvtransfer.base import NULL_BLOCK_ID, BlockGroup, BlockIds, TransferRequest
from tandem.kvtransfer.offload.policies import Key

_NUMBER_BYTES = 2  # of a state block's number


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one group's table, and the keys of the chunks in which they are."""

    group: int
    first: int
    end: int
    keys: Sequence[Key]


class Content(Protocol):
    """Says which keys are ready: a tier, or what is known of several."""

    def lookup(self, keys: Iterable[Key]) -> int:
        """Returns how many of these keys are ready, up to the first that is not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Together:
    """The keys that a tier has, and those that a peer's tier has."""

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
        # Sliding windows and chunks of attention: what the next token reads ends with the prefix and begins at
        # `first_read`.
        self._windows = {index: group for index, group in enumerate(groups) if group.window}
        self._states = {
            index: group.blocks_per_request for index, group in enumerate(groups) if group.blocks_per_request
        }
        self._num_groups = len(groups)
        self._of_tokens = [index for index in range(len(groups)) if index not in self._states]
        self.group_of_states = next(iter(self._states), None)
        # If False, a tier may have scattered parts of a prefix, and the prefix's end decides which of them are of use.
        self.needs_every_block = not (self._windows or self._states)
        # A window is of no use without the states after it. A model with states has both stored together.
        self.keeps_last_windows = bool(self._windows) and not self._states

    # ── names ──

    def keys(self, request: TransferRequest, group: int, first: int, last: int) -> Sequence[Key]:
        """Returns the keys of the request's chunks from `first` to before `last`."""
        factor = self._factor
        return self._keys_of(request.block_hashes[(first + 1) * factor - 1 : last * factor : factor], group)

    def _keys_of(self, hashes: Sequence[bytes], group: int) -> Sequence[Key]:
        return [block_hash + bytes([group]) for block_hash in hashes] if group else hashes

    def _state_keys(self, request: TransferRequest, group: int, end: int, count: int) -> list[Key]:
        """Returns the keys of the first `count` blocks of the states after the request's first `end` blocks."""
        return self._keys_of_state(request.block_hashes[end - 1], group, count)

    def _keys_of_state(self, block_hash: bytes, group: int, count: int) -> list[Key]:
        return [block_hash + number.to_bytes(_NUMBER_BYTES, "big") + bytes([group]) for number in range(count)]

    def block_of(self, key: Key) -> tuple[bytes, int] | None:
        """Returns the key's block hash and group; None for a block of states. A hash has an even number of bytes,
        whatever algorithm made it."""
        if len(key) % 2 == 0:
            return key, 0
        return None if key[-1] in self._states else (key[:-1], key[-1])

    def all_keys(self, manager: Content, request: TransferRequest) -> Sequence[Key]:
        """Returns all keys of the request's prefix, the most useful first: the first chunk of every group, then the
        second ones. The keys of states are among them only where the tier has states, because states are kept after
        few chunks."""
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

    def keys_after(self, request: TransferRequest, num_tokens: int) -> list[Key]:
        """Returns all keys under which a tier may have KV of the request's tokens after the first `num_tokens`."""
        first = num_tokens // self.block_size
        first_chunk, chunks = first // self._factor, len(request.block_hashes) // self._factor
        keys = [key for group in self._of_tokens for key in self.keys(request, group, first_chunk, chunks)]
        if self._states:
            for end in range(first + 1, len(request.block_hashes) + 1):
                keys += self.state_keys(request, end)
        return keys

    def state_keys(self, request: TransferRequest, end: int) -> list[Key]:
        """Returns the keys of all groups' states after the request's first `end` blocks."""
        return [key for group, count in self._states.items() for key in self._state_keys(request, group, end, count)]

    # ── what is there ──

    def end_of_prefix(self, manager: Content, request: TransferRequest, first: int, last: int) -> int:
        """Returns the end of the longest prefix that the tier completes, as the number of its blocks. The device has
        the blocks before `first`."""
        first_chunk, chunks = first // self._factor, len(request.block_hashes) // self._factor
        end = last
        for group in self._whole:
            found = manager.lookup(self.keys(request, group, first_chunk, chunks))
            end = min((first_chunk + found) * self._factor, end)
        while end > first:
            missing = max(
                (self._missing_in_window(manager, request, group, first, end) for group in self._windows), default=-1
            )
            if missing >= 0:
                end = missing  # every prefix that ends between this block and `end` needs the block, too
            elif self._states and not self._has_state(manager, request, end):
                end -= 1
            else:
                break
        return max(end, first)

    def missing(self, manager: Content, request: TransferRequest, end: int) -> Sequence[Key]:
        """Returns the keys of everything after the request's first `end` blocks, the most useful first."""
        return self.all_keys(manager, request)[end // self._factor * len(self._whole) :]

    def _missing_in_window(self, manager: Content, request: TransferRequest, group: int, first: int, end: int) -> int:
        """Returns the last block before `end` that the group needs and the tier lacks; -1 if it lacks none."""
        for block in range(end - 1, max(self._skipped(group, end), first) - 1, -1):
            if not manager.lookup(self.keys(request, group, block, block + 1)):
                return block
        return -1

    def _has_state(self, manager: Content, request: TransferRequest, end: int) -> bool:
        block_hash = request.block_hashes[end - 1]
        return bool(self._states) and all(self._has_state_of(manager, block_hash, group) for group in self._states)

    def _has_state_of(self, manager: Content, block_hash: bytes, group: int) -> bool:
        """Looks up the first block of the states alone, because most places have none."""
        keys = self._keys_of_state(block_hash, group, self._states[group])
        return bool(manager.lookup(keys[:1])) and manager.lookup(keys) == len(keys)

    def _skipped(self, group: int, end: int) -> int:
        """Returns how many leading blocks of the group no token after block `end` reads."""
        window = self._windows.get(group)
        return 0 if window is None else max(window.first_read(end * self.block_size), 0) // self.block_size

    # ── what a peer has ──

    def parts_of(self, manager: Content, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns, for each group, one bit for each of these blocks: whether the tier has it. `PrefixFound` carries
        them."""
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
        """Returns the keys that a peer has by its `parts_of`. Returns none if `parts` does not fit these blocks."""
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
        """Returns where the longest prefix ends whose parts are here or at the peer, and the keys of those that are not
        here."""
        end = self.end_of_prefix(Together(manager, theirs), request, first, last)
        if end == first:
            return first, []
        parts = self.to_load(request, first, end)
        return end, [key for part in parts for key in part.keys if not manager.lookup((key,))]

    # ── what is copied ──

    def to_load(self, request: TransferRequest, first: int, end: int) -> list[Part]:
        """Returns the parts of the request's blocks from `first` to before `end`, and the states after them."""
        spans = [(group, first) for group in self._whole]
        spans += [(group, max(self._skipped(group, end), first)) for group in self._windows]
        parts = [
            Part(group, start, end, self.keys(request, group, start // self._factor, -(-end // self._factor)))
            for group, start in spans
        ]
        return parts + self._states_after(request, end)

    def _states_after(self, request: TransferRequest, end: int) -> list[Part]:
        return [
            Part(group, 0, count, self._state_keys(request, group, end, count)) for group, count in self._states.items()
        ]

    def to_store(self, request: TransferRequest, first: int, full: int) -> list[Part]:
        """Returns the chunks from `first` to before `full` of the groups that keep every token."""
        factor = self._factor
        return [
            Part(group, first * factor, full * factor, self.keys(request, group, first, full)) for group in self._whole
        ]

    def checkpoint(self, request: TransferRequest, tables: BlockIds, end: int) -> list[Part]:
        """Returns what a request needs to continue after its first `end` blocks, and will give up: windows and
        states."""
        windows = self.last_windows(request, tables, end)
        return [self._shortened(part, end) for part in windows] + self._states_after(request, end)

    def new_windows(self, request: TransferRequest, tables: BlockIds, since: int, full: int) -> list[Part]:
        """Returns those blocks from `since` on that a request reads if it continues after its first `full` blocks."""
        parts = []
        for group in self._windows:
            table, first = tables[group], max(since, self._skipped(group, full))
            while first < full and table[first] == NULL_BLOCK_ID:
                first += 1
            if first < full:
                parts.append(Part(group, first, full, self.keys(request, group, first, full)))
        return parts

    def is_passed(self, group: int, place: int, end: int) -> bool:
        """Whether no request that continues after its first `end` blocks reads this block of a window, or these states
        after `place` blocks."""
        return place < (end if group in self._states else self._skipped(group, end))

    def gives_up(self, group: int) -> bool:
        """Whether a running request gives up blocks of this group."""
        return group in self._windows or group in self._states

    def _shortened(self, part: Part, end: int) -> Part:
        first = max(part.first, self._skipped(part.group, end))
        return dataclasses.replace(part, first=first, keys=part.keys[first - part.first :])

    def last_windows(self, request: TransferRequest, tables: BlockIds, full: int) -> list[Part]:
        """Returns the blocks that the request still has in the groups with a window."""
        parts = []
        for group in self._windows:
            kept = full - next((i for i in range(full) if tables[group][full - 1 - i] == NULL_BLOCK_ID), full)
            parts.append(Part(group, kept, full, self.keys(request, group, kept, full)))
        return parts

    def num_blocks(self, tables: BlockIds) -> int:
        """Returns how many blocks of tokens the tables have; 0 for a model that keeps states alone."""
        return len(tables[self._of_tokens[0]]) if self._of_tokens else 0
