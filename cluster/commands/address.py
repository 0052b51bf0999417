"""Which Ray cluster a command talks to, and the record of the `tandem serve` that runs on this machine, which lets other commands find
its Ray."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tandem.cluster.models.store import models_folder
from tandem.cluster.on_ray.runtime import AUTO
from tandem.wire.errors import TandemError


class WhichCluster(msgspec.Struct, frozen=True):
    """Which deployment a command is about, as the operator named it."""

    address: str | None = None  # HOST:PORT of the Ray cluster's head
    name: str | None = None  # the deployment's name; None means the cluster's only deployment


def choose_address(named: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the address that the operator named, else that of the `tandem serve` on this machine, else AUTO: this machine's cluster."""
    return named or environ.get("RAY_ADDRESS") or remembered_address() or AUTO


logger = logging.getLogger(__name__)


class AddressRecord(msgspec.Struct, frozen=True):
    address: str
    pid: int  # of the command, with which its Ray ends


def _file() -> Path:
    return models_folder().parent / "serving.json"


def remember_address(address: str) -> None:
    """Records the address. If several commands do, the last one wins. If it cannot be written, serving goes on, and other commands need
    --address."""
    try:
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(AddressRecord(address, os.getpid())))
        new.replace(file)
    except (OSError, TandemError) as error:
        logger.warning(
            "other commands need --address %s, because it could not be recorded: %s", address, error
        )


def forget_address() -> None:
    """Deletes the record if this process wrote it."""
    record = _read()
    if record is not None and record.pid == os.getpid():
        with contextlib.suppress(OSError):
            _file().unlink()


def remembered_address() -> str | None:
    record = _read()
    if record is None or not Path(f"/proc/{record.pid}").exists():
        return None
    return record.address


def _read() -> AddressRecord | None:
    try:
        return msgspec.json.decode(_file().read_bytes(), type=AddressRecord)
    except (OSError, TandemError, msgspec.DecodeError):
        return None
