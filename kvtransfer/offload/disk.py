"""The tier on a disk: one file of slots for each model and layout, which outlives the process.

A slot is a header and a chunk. The header has the chunk's key, the checksum of its bytes, and a checksum of itself.
Slots are not synced and are written in no special order. Whatever a crash leaves, torn or old or foreign, a chunk is
taken for a key only if both checksums agree when it is read. Otherwise it is computed again.

The file's first page has its generation, and each header has the generation in which its store was planned. When the
tier forgets everything, its thread changes and syncs the generation before it does anything else: what is in the file,
or still on its way there, is then no longer valid. When it forgets single keys, the thread wipes and syncs every header
that names one, also where the key was evicted before.

A file beside it (`.sources`) has the nodes from which the KV came (`kvtransfer.sources`), for this generation. It is
written and synced before anything is stored that came from a node which it does not name.

Every call to the file is made by the tier's thread, opening it too, and none while the step thread, or a copy of the
device's blocks, waits for it.

Nodes of one machine with the same folder take a file each: the first one that no other process has locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import EvictionPolicy, TierConfig
from tandem.kvtransfer.offload.chunks import ChunkCopier
from tandem.kvtransfer.offload.cpu import TierSurroundings
from tandem.kvtransfer.offload.files import Files, SystemFiles
from tandem.kvtransfer.offload.manager import SlotManager, StoreRoom, TierManager, filtered
from tandem.kvtransfer.offload.patience import OPEN_S, Hold, TierUnavailable
from tandem.kvtransfer.offload.policies import Key
from tandem.kvtransfer.offload.spec import Copy, LastingSpec, Mover
from tandem.kvtransfer.sources import KeptSources, TierSources
from tandem.wire.versions import KV_VERSION

logger = logging.getLogger(__name__)

_MAGIC = b"tandemk2"
_KEY_BYTES = 64
_GENERATION = struct.Struct("<8sQ")  # magic, generation; then the checksum of both
# magic, generation, time of writing, length of the key, key, checksum of the chunk; then the checksum of all that
_HEADER = struct.Struct(f"<8sQQH{_KEY_BYTES}s16s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = 4096  # a page of its own, so that writing it touches no chunk


class _SourcesFile(msgspec.Struct, frozen=True):
    generation: int  # of the slots' file
    kept: KeptSources


def create(config: TierConfig) -> DiskTier:
    return DiskTier(config)


class DiskTier(LastingSpec):
    name = "disk"

    def __init__(self, config: TierConfig, around: TierSurroundings | None = None) -> None:
        self._config = config
        self._around = around or TierSurroundings()
        self._followed: int | None = None
        self.recall = TierSources()

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        config = self._config
        slot_bytes = HEADER_BYTES + memory.block_bytes * config.block_factor
        num_slots = (config.size or 0) // slot_bytes
        if num_slots < 1:
            raise ConfigurationError(
                f"cache.tiers: {config.size} bytes of disk have no room for one entry of {slot_bytes} bytes"
            )
        name = identity(memory, config.block_factor)
        void: set[int] = set()

        def opened() -> SlotFile:
            file = SlotFile(Path(config.disk or ""), name, num_slots, slot_bytes, void, self._around.files)
            try:
                if self._followed is not None:
                    file.follow(self._followed)
            except OSError as error:
                file.close()
                raise TierUnavailable(error.strerror) from error
            self.recall.found(file.sources)
            return file

        copier = DiskCopier(memory, opened, config.block_factor)
        thread = self._around.copying(copier, wake, f"disk ({config.disk})")
        if not thread.await_open(OPEN_S):
            logger.error(
                "cache.tiers: disk %r: the node starts without this tier, and uses it once it works: %s",
                config.disk,
                thread.left_out,
            )
        self._copier = copier
        index = DiskIndex(
            copier.content,
            lambda: thread.do_first(lambda: copier.file.forget_all()),
            lambda keys: thread.do_first(lambda: copier.file.forget(keys)),
        )
        self.recall.bind(lambda kept: thread.do_first(lambda: copier.file.keep_sources(kept)), lambda: thread.has_first)
        manager = filtered(DiskManager(num_slots, config.policy, index, void), config.store_threshold)
        return manager, thread

    @property
    def generation(self) -> int | None:
        """None: the disk does not answer."""
        return self._copier.generation

    def follow(self, generation: int) -> None:
        """Takes rank 0's generation when the tier is opened. If the file has another one, its content was not stored with
        rank 0's: forgets it."""
        self._followed = generation


@dataclasses.dataclass(frozen=True)
class DiskIndex:
    """What a disk's manager must know of the file."""

    # The keys and slots that the file began with, the oldest first; None while it is not known.
    content: Callable[[], list[tuple[bytes, int]] | None]
    forget_all: Callable[[], None]
    forget: Callable[[set[bytes]], None]


class DiskManager(SlotManager):
    """Never waits for the disk. While the file's content is not known, the tier is left out."""

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, file: DiskIndex | SlotFile, void: set[int] | None = None
    ) -> None:
        """`void`: see `SlotFile`."""
        super().__init__(num_slots, policy)
        self._file = file
        self._void = void if void is not None else set()
        self._is_filled = False
        self._fill_once()

    def _fill_once(self) -> None:
        if not self._is_filled and (content := self._file.content()) is not None:
            self._is_filled = True
            self.fill(content)

    def lookup(self, keys: Iterable[Key]) -> int:
        if not self._is_filled:
            self._fill_once()
        return super().lookup(keys)

    def prepare_store(self, keys: Sequence[Key]) -> StoreRoom | None:
        if not self._is_filled:
            self._fill_once()
        return super().prepare_store(keys)

    def forget(self, keys: Iterable[Key]) -> None:
        gone = set(keys)
        slots = (self.policy.get(key) for key in gone)
        self._void.update(slot for slot in slots if slot is not None and self._is_written(slot))
        super().forget(gone)
        if gone:
            self._file.forget(gone)

    def _let_go(self, slot: int) -> None:
        super()._let_go(slot)
        self._void.discard(slot)

    def reset(self) -> None:
        self._is_filled = True  # with nothing, if the content was not known yet
        super().forget(list(self.policy.all_keys()))
        self.policy.clear()
        self._file.forget_all()


def identity(memory: KVCacheMemory, block_factor: int) -> str:
    """Returns what two processes must have in common, besides the keys, to read each other's chunks."""
    tensor = memory.tensor
    parts = [memory.model, str(tensor.dtype), *tensor.shape[1:], *tensor.stride()[1:], block_factor]
    parts.append(f"version {KV_VERSION}")
    if memory.heads is not None or memory.layers is not None:
        parts.append(f"{memory.heads} {memory.layers}")
    if memory.state_blocks:
        parts.append(f"states of {memory.state_blocks}")
    return xxhash.xxh3_128_hexdigest("|".join(map(str, parts)).encode())


class SlotFile:
    """The file and its lock. Only the thread that copies uses it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        num_slots: int,
        slot_bytes: int,
        void: set[int] | None = None,
        files: Files | None = None,
    ) -> None:
        """`void`: slots to which nothing is written, because what their stores hold was forgotten. The step thread changes it. Raises
        TierUnavailable: a node serves without a disk that is full or broken."""
        self._files = files = files or SystemFiles()
        self._num_slots = num_slots
        self._void = void if void is not None else set()
        self._slot_bytes = slot_bytes
        try:
            self._file = files.open_first(folder, name)
            with contextlib.ExitStack() as undo:
                undo.callback(self._file.close)
                self._sources_path = self._file.path.with_suffix(".sources")
                size = HEADER_BYTES + num_slots * slot_bytes
                there = self._file.allocated_bytes
                if (free := files.free_bytes(folder)) + there < size:
                    raise TierUnavailable(f"{(free + there) >> 20} MiB are left for a tier of {size >> 20} MiB")
                self._file.resize(size)
                self._resets = 0
                self._is_empty = False  # also of its generation
                # The file's generation when it was opened.
                self.generation = self._stored_generation()
                self.sources = self._read_sources()
                found = [self._header(slot) for slot in range(num_slots)]
                undo.pop_all()
        except OSError as error:
            raise TierUnavailable(f"disk {str(folder)!r}: {error.strerror or error}") from error
        # What each header says, also of keys that were evicted since.
        self._named = [header[1] if header else None for header in found]
        self._unknown: set[int] = set()  # slots whose header could not be written: it may be the old one or the new one
        self._written = itertools.count(max((header[0] for header in found if header), default=0) + 1)
        entries = sorted((when, slot, key) for slot, header in enumerate(found) if header for when, key, _ in [header])
        # A key may also stand in a slot from which it was evicted.
        newest = {key: slot for _, slot, key in entries}
        self._content = [(key, slot) for _, slot, key in entries if newest[key] == slot]

    def content(self) -> list[tuple[bytes, int]]:
        """Returns the keys and slots that the headers name, the oldest first."""
        return self._content

    def _stored_generation(self) -> int:
        raw = self._file.read(_GENERATION.size + _CHECKSUM_BYTES, 0)
        if (content := _checked(raw, _GENERATION, 0)) is not None:
            return int(content[1])
        # A new file, or not one of ours: no header in it has this generation.
        generation = int.from_bytes(os.urandom(7), "little")
        self._store_generation(generation)
        return generation

    def _store_generation(self, generation: int) -> None:
        self._file.write(_with_checksum(_GENERATION.pack(_MAGIC, generation), 0), 0)
        self._file.sync()
        self._is_empty = False

    def follow(self, generation: int) -> None:
        """Sets the generation. Called before anything is read or written."""
        if self.generation != generation:
            self.generation = generation
            self._store_generation(generation)

    def forget_all(self) -> None:
        """Makes everything in the file invalid, and everything that stores which were planned earlier still write."""
        self._named = [None] * self._num_slots
        try:
            self._store_generation(self.generation + self._resets + 1)
        except OSError:
            self._empty()
            raise
        self._resets += 1  # here, because one that fails is tried again

    def forget(self, keys: set[bytes]) -> None:
        try:
            if self._is_empty:
                self._store_generation(self.generation + self._resets)
            for slot, key in enumerate(self._named):
                if key in keys or slot in self._unknown:
                    self._file.write(bytes(_HEADER.size), self._start(slot))
                    self._named[slot] = None
                    self._unknown.discard(slot)
            self._file.sync()
        except OSError:
            self._empty()
            raise

    def _empty(self) -> None:
        """A disk that takes nothing mostly still gives back: if the process ends before the next try, nothing is found."""
        self._is_empty = True
        self._file.resize(0)
        self._file.sync()

    def keep_sources(self, kept: KeptSources) -> None:
        content = msgspec.msgpack.encode(_SourcesFile(self.generation + self._resets, kept))
        self._files.replace(self._sources_path, _with_checksum(content, 0))

    def _read_sources(self) -> KeptSources:
        """Forgets everything if it is not known from where the KV came."""
        if (raw := self._files.content(self._sources_path)) is None:
            return KeptSources()
        content = raw[:-_CHECKSUM_BYTES]
        try:
            if raw != _with_checksum(content, 0):
                raise ValueError("its checksum differs")
            there = msgspec.msgpack.decode(content, type=_SourcesFile)
        except ValueError as error:
            logger.error("cache.tiers: %s: %s; nothing of the tier is used", self._sources_path, error)
            self.generation += 1
            self._store_generation(self.generation)
            return KeptSources()
        return there.kept if there.generation == self.generation else KeptSources()

    def _start(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._slot_bytes

    def _header(self, slot: int) -> tuple[int, bytes, bytes] | None:
        """Returns when the slot was written, its key, and its chunk's checksum; None if the header is not valid."""
        raw = self._file.read(_HEADER.size + _CHECKSUM_BYTES, self._start(slot))
        if (content := _checked(raw, _HEADER, slot + 1)) is None:
            return None
        _, generation, when, length, key, checksum = content
        if generation != self.generation + self._resets or length > _KEY_BYTES:
            return None
        return when, key[:length], checksum

    def write(self, slot: int, key: bytes, chunk: memoryview, resets: int) -> bool:
        """Returns whether it was written. `resets`: how often everything had been forgotten when the store was
        planned."""
        checksum = xxhash.xxh3_128_digest(chunk)
        generation = self.generation + resets
        header = _HEADER.pack(_MAGIC, generation, next(self._written), len(key), key, checksum)
        header = _with_checksum(header, slot + 1)
        if slot in self._void:
            return False
        start = self._start(slot)
        self._unknown.add(slot)
        try:
            if self._file.write(header, start) != len(header):
                return False
            self._named[slot] = key
            self._unknown.discard(slot)
            return self._file.write(chunk, start + HEADER_BYTES) == chunk.nbytes
        except OSError:
            return False  # the disk is full or broken

    def read(self, slot: int, key: bytes, into: memoryview) -> bool:
        """Returns whether `into` holds the key's chunk now. If not, its content is undefined."""
        try:
            header = self._header(slot)
            if header is None or header[1] != key:
                return False
            count = self._file.read_into(into, self._start(slot) + HEADER_BYTES)
        except OSError:
            return False
        return count == into.nbytes and xxhash.xxh3_128_digest(into) == header[2]

    def probe(self) -> bool:
        """Writes the rest of the first page, and reads it back from the disk itself. Returns whether that went well."""
        start, nonce = HEADER_BYTES // 2, os.urandom(16)
        try:
            self._file.write(nonce, start)
            self._file.sync()
            self._file.drop_cached(HEADER_BYTES)
            return self._file.read(len(nonce), start) == nonce
        except OSError:
            return False

    def close(self) -> None:
        self._file.close()


def _with_checksum(content: bytes, seed: int) -> bytes:
    return content + xxhash.xxh3_128_digest(content, seed=seed)


def _checked(raw: bytes, layout: struct.Struct, seed: int) -> tuple[Any, ...] | None:
    content = raw[: layout.size]
    if raw[:8] != _MAGIC or len(raw) != layout.size + _CHECKSUM_BYTES or raw != _with_checksum(content, seed):
        return None
    return layout.unpack(content)


class DiskCopier(ChunkCopier):
    """Copies through one chunk of host memory, and compares its checksum before anything reaches the device's
    blocks."""

    def __init__(self, memory: KVCacheMemory, open_file: Callable[[], SlotFile], block_factor: int) -> None:
        super().__init__(memory, block_factor)
        self._open_file = open_file
        self._opened: SlotFile | None = None

    def open(self) -> None:
        opened = self._open_file()
        self._chunk = self.new_chunk()
        self._opened = opened

    @property
    def file(self) -> SlotFile:
        if self._opened is None:
            raise InternalError("a disk tier's file is used before it is open")
        return self._opened

    def content(self) -> list[tuple[bytes, int]] | None:
        return self._opened.content() if self._opened is not None else None

    @property
    def generation(self) -> int | None:
        return self._opened.generation if self._opened is not None else None

    def probe(self) -> bool:
        return self.file.probe()

    def copy(self, job: Copy, to_device: bool, fence: Any, hold: Hold) -> bool:
        if fence is not None:
            fence.synchronize()
        chunk, right = self._chunk, True
        for key, slot, places in self.chunks_of(job):
            if not to_device:
                self.gather(chunk, places, hold)
                right = self.file.write(slot, key, chunk.bytes, job.resets) and right
            elif right := right and self.file.read(slot, key, chunk.bytes):
                self.scatter(chunk, places, hold)
        return right

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
