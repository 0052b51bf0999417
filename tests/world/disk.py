"""A disk of the world. What was written and not synced outlives the end of a process, and not a power cut: then each write is there,
lost, or torn. A disk may be slow, hang, be full, or give back other bytes than were written."""

from __future__ import annotations

import dataclasses
import errno
import random
from collections.abc import Callable
from pathlib import Path

from tests.world.process import Process


@dataclasses.dataclass
class DiskWeather:
    takes_s: tuple[float, float] = (0.0005, 0.01)  # what the disk adds to each copy, and other work
    full: float = 0.0  # how likely a write finds the disk full, or writes only a part
    broken: float = 0.0  # how likely a call fails
    flips: float = 0.0  # how likely a read gives back another byte
    hangs: bool = False


class ProcessEnded(BaseException):
    """The process ends inside a call to its disk."""


@dataclasses.dataclass
class _Content:
    now: bytearray = dataclasses.field(default_factory=bytearray)
    synced: bytearray = dataclasses.field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    held_by: Process | None = None

    def put(self, start: int, content: bytes) -> None:
        _put(self.now, start, content)
        self.unsynced.append((start, content))

    def sync(self) -> None:
        for start, content in self.unsynced:
            _put(self.synced, start, content)
        self.unsynced.clear()


def _put(into: bytearray, start: int, content: bytes) -> None:
    if len(into) < start + len(content):
        into.extend(bytes(start + len(content) - len(into)))
    into[start : start + len(content)] = content


class WorldDisk:
    """The files of one machine."""

    def __init__(self, rng: random.Random, note: Callable[[str], None]) -> None:
        self.rng, self.note = rng, note
        self.weather = DiskWeather()
        self._slots: dict[Path, _Content] = {}
        self._whole: dict[Path, bytes] = {}
        self.is_calm = False  # every call succeeds
        self._calls_left: int | None = None  # until the process ends, in a call
        self._late: list[Callable[[], None]] | None = None  # takes the writes of a store, which happen while it lasts

    # ── what a process that copies needs beyond `Files` ──

    def begin_store(self) -> None:
        """What is written until `end_store` arrives when the caller lets it."""
        self._late = []

    def end_store(self) -> list[Callable[[], None]]:
        late, self._late = self._late or [], None
        return late

    def end_inside(self, work: Callable[[], None], calls: int) -> None:
        """Does `work`, but its process ends in the call after so many."""
        self._calls_left = calls
        try:
            work()
        except (ProcessEnded, OSError):
            pass
        finally:
            self._calls_left = None

    def power_cut(self) -> None:
        """No process runs. Of what was not synced, each write is there, lost or torn."""
        lost = 0
        for content in self._slots.values():
            for start, data in content.unsynced:
                fate = self.rng.random()
                kept = len(data) if fate < 0.4 else self.rng.randrange(len(data) or 1) if fate < 0.7 else 0
                lost += kept < len(data)
                _put(content.synced, start, data[:kept])
            content.unsynced.clear()
            content.now = bytearray(content.synced)
        self.note(f"the disk loses {lost} writes, or parts of them")

    def release(self, process: Process) -> None:
        for content in self._slots.values():
            if content.held_by is process:
                content.held_by = None

    def call(self) -> None:
        if self._calls_left is not None:
            if self._calls_left == 0:
                raise ProcessEnded
            self._calls_left -= 1
        if not self.is_calm and self.rng.random() < self.weather.broken:
            raise OSError(errno.EIO, "Input/output error")

    def write(self, content: _Content, data: bytes, start: int) -> int:
        self.call()
        if not self.is_calm and self.rng.random() < self.weather.full:
            if self.rng.random() < 0.5:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[: self.rng.randrange(len(data) or 1)]
        if self._late is not None:
            self._late.append(lambda: content.put(start, data))
        else:
            content.put(start, data)
        return len(data)

    # ── Files, for a process ──

    def files_of(self, process: Process) -> WorldFiles:
        return WorldFiles(self, process)

    def open_first(self, process: Process, folder: Path, name: str) -> tuple[Path, _Content]:
        number = 0
        while True:
            path = folder / f"{name}-{number}.kv"
            content = self._slots.setdefault(path, _Content())
            if content.held_by is None:
                content.held_by = process
                return path, content
            number += 1

    def whole(self, path: Path) -> bytes | None:
        self.call()
        return self._whole.get(path)

    def replace(self, path: Path, content: bytes) -> None:
        for _ in range(3):
            self.call()
        self._whole[path] = content
        self.call()


class WorldFile:
    """One open file of the slots."""

    def __init__(self, disk: WorldDisk, path: Path, content: _Content) -> None:
        self.path = path
        self._disk, self._content = disk, content

    @property
    def allocated_bytes(self) -> int:
        return len(self._content.now)

    def resize(self, size: int) -> None:
        self._disk.call()
        for content in (self._content.now, self._content.synced):
            content.extend(bytes(max(0, size - len(content))))
            del content[size:]

    def read(self, count: int, start: int) -> bytes:
        self._disk.call()
        read = bytearray(self._content.now[start : start + count])
        if read and self._disk.rng.random() < self._disk.weather.flips:
            read[self._disk.rng.randrange(len(read))] ^= 1 << self._disk.rng.randrange(8)
        return bytes(read)

    def read_into(self, into: memoryview, start: int) -> int:
        read = self.read(into.nbytes, start)
        into[: len(read)] = read
        return len(read)

    def write(self, content: bytes | memoryview, start: int) -> int:
        return self._disk.write(self._content, bytes(content), start)

    def sync(self) -> None:
        self._disk.call()
        self._content.sync()

    def drop_cached(self, size: int) -> None:
        self._disk.call()

    def close(self) -> None:
        self._content.held_by = None


class WorldFiles:
    """The disk as one process sees it."""

    def __init__(self, disk: WorldDisk, process: Process) -> None:
        self._disk, self._process = disk, process

    def open_first(self, folder: Path, name: str) -> WorldFile:
        return WorldFile(self._disk, *self._disk.open_first(self._process, folder, name))

    def free_bytes(self, folder: Path) -> int:
        return 1 << 30

    def content(self, path: Path) -> bytes | None:
        return self._disk.whole(path)

    def replace(self, path: Path, content: bytes) -> None:
        self._disk.replace(path, content)
