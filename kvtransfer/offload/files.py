"""The calls that a tier on a disk makes to its file system. Each may take long, and may raise OSError. A simulation brings its own."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Protocol

from tandem.base.errors import ConfigurationError

MOST_FILES = 256


class OpenFile(Protocol):
    """A file that no other process has open."""

    @property
    def path(self) -> Path: ...
    @property
    def allocated_bytes(self) -> int:
        """What it takes of the disk now."""

    def resize(self, size: int) -> None: ...
    def read(self, count: int, start: int) -> bytes: ...
    def read_into(self, into: memoryview, start: int) -> int:
        """Returns how many bytes were read."""

    def write(self, content: bytes | memoryview, start: int) -> int:
        """Returns how many bytes were written. A crash may lose them, or a part, until `sync` has returned."""

    def sync(self) -> None: ...
    def drop_cached(self, size: int) -> None:
        """The next read of the first `size` bytes comes from the disk itself."""

    def close(self) -> None: ...


class Files(Protocol):
    def open_first(self, folder: Path, name: str) -> OpenFile:
        """Opens the first of the folder's files of this name that no other process has open; makes what is missing."""

    def free_bytes(self, folder: Path) -> int: ...
    def content(self, path: Path) -> bytes | None:
        """Returns a whole file, or None if there is none."""

    def replace(self, path: Path, content: bytes) -> None:
        """Replaces a whole file. After a crash it has the old or the new content; when this has returned, the new one."""


class SystemFile:
    def __init__(self, number: int, path: Path) -> None:
        self._number = number
        self.path = path

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self._number).st_blocks * 512

    def resize(self, size: int) -> None:
        os.ftruncate(self._number, size)

    def read(self, count: int, start: int) -> bytes:
        return os.pread(self._number, count, start)

    def read_into(self, into: memoryview, start: int) -> int:
        return os.preadv(self._number, [into], start)

    def write(self, content: bytes | memoryview, start: int) -> int:
        return os.pwrite(self._number, content, start)

    def sync(self) -> None:
        os.fdatasync(self._number)

    def drop_cached(self, size: int) -> None:
        os.posix_fadvise(self._number, 0, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._number)


class SystemFiles:
    def open_first(self, folder: Path, name: str) -> SystemFile:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_FILES):
            path = folder / f"{name}-{number}.kv"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            else:
                return SystemFile(file, path)
        raise ConfigurationError(f"cache.tiers: {folder} is in use by {MOST_FILES} processes")

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free

    def content(self, path: Path) -> bytes | None:
        return path.read_bytes() if path.exists() else None

    def replace(self, path: Path, content: bytes) -> None:
        beside = path.with_suffix(".new")
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
