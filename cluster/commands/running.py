"""The records of the `tandem serve` that run on this machine: one file for each process, which other commands read.

A record's process is known by its id and its start, so a later process with the same id is another one. A record is deleted when its
process is proved to have ended, however old or new it is. Where the folder is shared by several machines or containers, each reads its
own records and leaves the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tandem.base.errors import TandemError
from tandem.cluster.models.store import models_folder

logger = logging.getLogger(__name__)


class ServingRecord(msgspec.Struct, frozen=True):
    address: str  # of its Ray cluster's head
    name: str  # the deployment's
    pid: int  # of the command
    started: int  # when that process started, in clock ticks since this machine booted
    system: str  # the boot and the process namespace that the id belongs to
    url: str = ""  # of its router, https:// where it has a certificate; "" until it answers
    model: str = ""

    @property
    def port(self) -> int | None:
        return urlsplit(self.url).port if self.url else None

    @property
    def since(self) -> str:
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        start = datetime.fromtimestamp(booted + self.started / os.sysconf("SC_CLK_TCK"))
        return start.astimezone().isoformat(sep=" ", timespec="seconds")


def record_serving(address: str, name: str, model: str, url: str = "") -> None:
    """Writes this process's record, in place of its former one. If it cannot be written, serving goes on, and other commands need
    --address."""
    pid = os.getpid()
    try:
        started, system = _started(pid) or 0, _system()
        record = ServingRecord(address, name, pid, started, system, url, model)
        file = _file(record)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(record))
        new.replace(file)
    except (OSError, TandemError) as error:
        logger.warning("other commands need --address %s, because it could not be recorded: %s", address, error)


def forget_serving() -> None:
    with contextlib.suppress(OSError, TandemError):
        for record in _records():
            if record.pid == os.getpid() and _is_alive(record):
                _file(record).unlink()


def running() -> list[ServingRecord]:
    """Returns the records of the processes that run here, the oldest first, and deletes those of processes that have ended."""
    found: list[ServingRecord] = []
    try:
        system = _system()
        for record in _records():
            if record.system != system:
                continue
            if _is_alive(record):
                found.append(record)
            else:
                with contextlib.suppress(OSError):
                    _file(record).unlink()
    except (OSError, TandemError):
        return found
    return sorted(found, key=lambda record: record.started)


def _folder() -> Path:
    return models_folder().parent / "serving"


def _file(record: ServingRecord) -> Path:
    return _folder() / f"{record.pid}-{record.started}.json"


def _records() -> list[ServingRecord]:
    records: list[ServingRecord] = []
    for file in _folder().glob("*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            records.append(msgspec.json.decode(file.read_bytes(), type=ServingRecord))
    return records


def _is_alive(record: ServingRecord) -> bool:
    return record.system == _system() and _started(record.pid) == record.started


def _started(pid: int) -> int | None:
    """Returns the start of the process; None if there is none, or if it has ended and its parent has not read its status yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = fields.split()
    return None if state in ("Z", "X") else int(rest[18])


def _system() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
