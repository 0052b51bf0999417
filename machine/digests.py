"""The SHA-256 of files, computed once for as long as a file does not change.

A file counts as unchanged while its device, inode, size, mtime and ctime are: the kernel sets the ctime at every write, and programs
cannot set it back. The hub's cache names a large file after its SHA-256, and that name is trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_AT_ONCE = 4  # files that are hashed in parallel; hashing releases the GIL
# A file that was just written may be written again within the same tick of its clock
_FRESH_NS = 2_000_000_000
_SHA256 = re.compile("[0-9a-f]{64}")


OnRead = Callable[[int], None]
"""Called with each number of bytes that was read, from several threads."""


def _ignore(num_bytes: int) -> None:
    pass


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder for what Tandem can make again if it is deleted; None for a user without a home folder."""
    root = environ.get("TANDEM_CACHE")
    if root:
        return Path(root)
    try:
        return Path.home() / ".cache" / "tandem"
    except RuntimeError:
        return None


def digests_of(files: Sequence[Path], on_read: OnRead = _ignore) -> list[str]:
    """Returns each file's digest in hexadecimal. Reads several files at once. Raises OSError."""
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(1, len(files)))) as pool:
        return list(pool.map(lambda file: digest_of(file, on_read), files))


def digest_of(file: Path, on_read: OnRead = _ignore) -> str:
    real = file.resolve()
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name
    before = _identity(real)
    kept = _kept_in(real)
    if kept is not None and (known := _read(kept, before)) is not None:
        return known
    with real.open("rb") as content:
        digest = _hash(content, on_read)
    if kept is not None and _identity(real) == before and time.time_ns() - before[-1] > _FRESH_NS:
        _write(kept, before, digest)
    return digest


def _hash(content: BinaryIO, on_read: OnRead) -> str:
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    while num_bytes := content.readinto(buffer):  # type: ignore[attr-defined]
        sha256.update(buffer[:num_bytes])
        on_read(num_bytes)
    return sha256.hexdigest()


def _identity(file: Path) -> list[int]:
    there = file.stat()
    return [there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns]


def _kept_in(file: Path) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "digests" / hashlib.sha256(os.fsencode(file)).hexdigest()[:32]


def _read(kept: Path, identity: list[int]) -> str | None:
    try:
        content = json.loads(kept.read_bytes())
        digest = content["sha256"] if content["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if isinstance(digest, str) and _SHA256.fullmatch(digest) else None


def _write(kept: Path, identity: list[int], digest: str) -> None:
    """If it cannot be written, the file is hashed again next time."""
    with suppress(OSError):
        write_whole(kept, json.dumps({"identity": identity, "sha256": digest}).encode())


def write_whole(file: Path, content: bytes) -> None:
    """Replaces the file at once, so that no one reads half of it. Raises an OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    try:
        with open(descriptor, "wb") as out:
            out.write(content)
        os.replace(name, file)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise
