"""Packed weights in files that all nodes of a machine map: they are packed once, and in memory once.

A file belongs to no process. It has its name only when it is whole, and nothing writes to it afterwards. Who uses it has a shared lock of
it. Who packs a model deletes what is in no use and out of date: files of other packings of the model, files that were not used for a month,
and others if the disk has no room. All of this may be deleted at any time: weights are then packed again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.base.errors import InternalError
from tandem.engine.model.capabilities import ModelLoad
from tandem.engine.model.native.architecture import describe
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.engine.model.source import Progress
from tandem.kernels import library
from tandem.machine.digests import cache_folder, digest_of

T = TypeVar("T")

log = logging.getLogger(__name__)

WORTH_BYTES = 32 << 20  # less is not worth a file
KEPT_S = 30 * 24 * 3600.0  # since their last use
REPLACED_S = 3600.0  # the same for other packings of the model: another version's, or of another dtype
WAIT_S = 900.0  # for another process that packs the same weights
_FREE_SHARE, _FREE_BYTES = 0.05, 1 << 30  # how much of the disk stays free: the larger of the two
_HELD_S = 5.0
_LOOK_S = 0.1
_TELL_S = 1.0
_CODE = Path(__file__).parents[1]  # of which any change may change what is packed
_UNFINISHED = ".partial"


def pack_once(loading: ModelLoad, config: Any, pack: Callable[[], NativeLlamaForward]) -> NativeLlamaForward:
    """The model with the weights of this machine's file of them, which is made if there is none. A small model has its own, and so has
    each node where no file can be kept. `config` is that of the model with ordinary matrices."""
    root, content = cache_folder(), loading.content
    if root is None or content is None or find_spec("fcntl") is None:
        return pack()
    if describe(config).num_weights * loading.dtype.itemsize < WORTH_BYTES:
        return pack()
    shelf, name = Shelf(root / "packed", loading.progress), _name(content().digest, loading, config)

    def mapped(file: int | None) -> NativeLlamaForward | None:
        if file is None:
            return None
        forward = NativeLlamaForward(config, None, dtype=loading.dtype, threads=loading.threads)
        try:
            shelf.while_telling("mapping the weights", lambda: forward.use_file(file))
        except InternalError as error:  # a disk that cannot read it any more
            log.warning("the packed weights of %s are packed again: %s", loading.source.name, error)
            os.close(file)
            shelf.forget(name)
            return None
        weakref.finalize(forward, os.close, file)
        return forward

    if (forward := mapped(shelf.find(name))) is not None:
        return forward
    with shelf.turn(name) as new:
        if new is None and (forward := mapped(shelf.find(name))) is not None:
            return forward
        packed, file = pack(), None
        if new is not None and packed.generates:
            embedding = describe(config).vocab * describe(config).hidden * loading.dtype.itemsize
            file = shelf.keep(name, new, packed.weight_bytes + embedding, packed.write_file)
    if file is None:
        return packed
    packed.close()
    return mapped(file) or pack()


def _name(content: str, loading: ModelLoad, config: Any) -> str:
    """What all nodes that compute alike pack alike: the model's content, how it is computed, and by which code."""
    digest = hashlib.sha256(digest_of(library.path()).encode())
    for file in sorted(_CODE.rglob("*.py")):
        digest.update(file.read_bytes())
    computed = (describe(config), str(loading.dtype), library.instruction_set(loading.dtype))
    digest.update(msgspec.json.encode(computed))
    return f"{content[:24]}-{digest.hexdigest()[:24]}"


class Shelf:
    """The folder with this machine's packed weights."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder, self._progress = folder, progress

    def find(self, name: str) -> int | None:
        """A descriptor of the file, which stays locked against deletion until it is closed; None if there is no such file."""
        import fcntl

        path = self._folder / name
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            # Who has just named it or deletes it holds it for a moment.
            until = time.monotonic() + _HELD_S
            while not _locked(file, fcntl.LOCK_SH):
                if time.monotonic() > until:
                    raise OSError(f"another process held it for {_HELD_S:.0f} s")
                time.sleep(_LOOK_S)
            if _is(path, file):
                with suppress(OSError):
                    os.utime(file)  # its last use
                return file
        except OSError:
            pass
        os.close(file)
        return None

    def forget(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).unlink()

    @contextmanager
    def turn(self, name: str) -> Iterator[int | None]:
        """Waits for its turn to make this file. Yields an empty file, which `keep` makes the one of this name; None if there is one of this
        name by now, or none can be made. An unfinished file is deleted."""
        file = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._begin(name)
        except OSError as error:
            _private(error)
        try:
            yield file
        finally:
            if file is not None:
                if _is(path := self._folder / (name + _UNFINISHED), file):
                    path.unlink(missing_ok=True)
                os.close(file)

    def _begin(self, name: str) -> int | None:
        import fcntl

        path, until = self._folder / (name + _UNFINISHED), time.monotonic() + WAIT_S
        while not (self._folder / name).exists():
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _locked(file, fcntl.LOCK_EX) and _is(path, file):
                if not (self._folder / name).exists():
                    os.ftruncate(file, 0)
                    return file
                path.unlink()  # another process has just given its file the name, and this one is new
            os.close(file)
            if time.monotonic() > until:
                raise OSError(f"another process has packed the same weights for {WAIT_S:.0f} s")
            self._progress("waiting for another node, which packs the weights", 0.0)
            time.sleep(_LOOK_S)
        return None

    def keep(self, name: str, file: int, num_bytes: int, write: Callable[[int], None]) -> int | None:
        """Writes the file and gives it its name. Returns a descriptor of it, as `find` does; None if there is no room."""
        import fcntl

        try:
            self._make_room(name, num_bytes)

            def write_all() -> None:
                write(file)
                os.fsync(file)

            self.while_telling("keeping the packed weights for this machine's nodes", write_all)
            os.rename(self._folder / (name + _UNFINISHED), self._folder / name)
            fcntl.flock(file, fcntl.LOCK_SH)
        except (OSError, InternalError) as error:
            _private(error)
            return None
        return os.dup(file)  # with the same lock

    def _make_room(self, name: str, num_bytes: int) -> None:
        now = time.time()
        others = []
        for path in self._folder.iterdir():
            with suppress(OSError):
                others.append((path.stat().st_mtime, path))
        model = name.partition("-")[0]
        for used, path in sorted(others):
            disk = shutil.disk_usage(self._folder)
            lacks_room = disk.free - num_bytes < max(_FREE_BYTES, int(disk.total * _FREE_SHARE))
            is_old = used < now - (REPLACED_S if path.name.partition("-")[0] == model else KEPT_S)
            if (lacks_room or is_old) and path.name != name + _UNFINISHED:
                _delete(path)
        disk = shutil.disk_usage(self._folder)
        if disk.free - num_bytes < max(_FREE_BYTES, int(disk.total * _FREE_SHARE)):
            raise OSError(f"{self._folder} has {disk.free >> 20} MiB left, and they take {num_bytes >> 20}")

    def while_telling(self, what: str, work: Callable[[], T]) -> T:
        """Runs `work`, which may take minutes on a slow disk, and says each second that it is running."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights") as one:
            result = one.submit(work)
            while not result.done():
                self._progress(what, 0.0)
                wait([result], _TELL_S)
            return result.result()


def _private(why: Exception) -> None:
    log.warning("this node has its packed weights for itself: %s", why)


def _is(path: Path, file: int) -> bool:
    """Whether the path still names this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except OSError:
        return False


def _locked(file: int, how: int) -> bool:
    """Whether this lock was to be had at once."""
    import fcntl

    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _delete(path: Path) -> None:
    """Deletes a file that no process uses."""
    import fcntl

    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _locked(file, fcntl.LOCK_EX):
                path.unlink()
        finally:
            os.close(file)
