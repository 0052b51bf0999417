"""Keeps a cluster's record in one file on the head's host, which every program changes under one lock.

On the head the file is opened directly. From anywhere else it is read over ssh, and written only if it has not changed since; if it has, the
change is applied again to the new content.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.saving import as_json
from tandem.cluster.static_hosts.config import StaticProvider, ssh_settings_on_head
from tandem.cluster.static_hosts.record import ClusterRecord, decode
from tandem.cluster.static_hosts.shell import LocalShell, ScriptFailed, Shell, SshShell, ThroughHead
from tandem.machine.digests import write_whole

_FOLDER = ".tandem/clusters"
_CHANGED_MEANWHILE = 75
_ATTEMPTS = 10

Change = Callable[[ClusterRecord], ClusterRecord]


class RecordStore(Protocol):
    def read(self) -> ClusterRecord: ...

    def last_read(self) -> ClusterRecord:
        """Returns the last record that was read. Asks over the network only if none was."""

    def update(self, change: Change) -> ClusterRecord:
        """Applies `change` and returns the new record. `change` may be called several times, so it must have no side effects."""


def record_file(cluster_name: str) -> str:
    """Returns the path relative to the home of the user as which Ray runs."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", cluster_name):
        raise ConfigurationError(
            f"cluster_name must be letters, digits, '-', '_' and '.', not {cluster_name!r}: a file is named after it"
        )
    return f"{_FOLDER}/{cluster_name}.json"


class LocalStore:
    def __init__(self, cluster_name: str, home: Path | None = None) -> None:
        self._path = (home or Path.home()) / record_file(cluster_name)

    def read(self) -> ClusterRecord:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        return decode(content, str(self._path))

    def last_read(self) -> ClusterRecord:
        return self.read()

    def update(self, change: Change) -> ClusterRecord:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{self._path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.read()
            after = change(before)
            if after != before:
                write_whole(self._path, as_json(after))
        return after


class RemoteStore:
    def __init__(self, cluster_name: str, shell: Shell, head: str) -> None:
        self._file = record_file(cluster_name)
        self._shell = shell
        self._head = head
        self._content: bytes | None = None

    def read(self) -> ClusterRecord:
        self._content = self._shell.run(self._head, f'cat "$HOME"/{self._file} 2>/dev/null || true')
        return self._decode(self._content)

    def last_read(self) -> ClusterRecord:
        return self.read() if self._content is None else self._decode(self._content)

    def update(self, change: Change) -> ClusterRecord:
        for _ in range(_ATTEMPTS):
            before = self.last_read()
            after = change(before)
            if after == before or self._replace(self._content or b"", as_json(after)):
                return after
            self._content = None
        raise Unavailable(
            f"{self._head}: ~/{self._file} was changed by other programs at each of {_ATTEMPTS} tries: try again"
        )

    def _replace(self, old: bytes, new: bytes) -> bool:
        """The script reads before it locks: the link may stall, and the autoscaler on the head waits for the lock. The link may also end in the
        middle, which looks like the end of what is read."""
        script = f"""
            set -e; umask 077
            file="$HOME"/{self._file}; mkdir -p "${{file%/*}}"
            command -v flock >/dev/null || {{ echo "flock (util-linux) is not installed" >&2; exit 1; }}
            is() {{ now=$(cat "$1" 2>/dev/null | sha256sum); [ "${{now%% *}}" = "$2" ]; }}
            new=$(mktemp "$file.XXXXXX"); trap 'rm -f "$new"' EXIT
            cat >"$new"
            is "$new" {hashlib.sha256(new).hexdigest()} || {{ echo "the record did not arrive whole" >&2; exit 1; }}
            exec 9>"$file.lock"; flock -w 10 9 || {{ echo "$file.lock is held by another program" >&2; exit 1; }}
            is "$file" {hashlib.sha256(old).hexdigest()} || exit {_CHANGED_MEANWHILE}
            mv "$new" "$file"
        """
        try:
            self._shell.run(self._head, script, stdin=new)
        except ScriptFailed as error:
            if error.status == _CHANGED_MEANWHILE:
                return False
            raise
        self._content = new
        return True

    def _decode(self, content: bytes) -> ClusterRecord:
        return decode(content, f"{self._head}:~/{self._file}")


@dataclass(frozen=True, slots=True)
class Reach:
    head_address: str  # in the cluster's own network
    entrance: str  # the head's address from this machine
    on_head: bool
    to_head: Shell
    to_workers: Shell
    store: RecordStore


def reach_from_here(settings: StaticProvider, cluster_name: str) -> Reach:
    if settings.ssh is None:
        raise ConfigurationError("provider.ssh is missing: this provider is made for `ray up`, which fills it in")
    head_address = resolve(settings.head_ip)
    direct = SshShell(settings.ssh)
    if is_own_address(head_address):
        return Reach(head_address, head_address, True, LocalShell(), direct, LocalStore(cluster_name))
    entrance = settings.external_head_ip or head_address
    return Reach(
        head_address,
        entrance,
        on_head=False,
        to_head=direct,
        to_workers=ThroughHead(direct, entrance, ssh_settings_on_head(settings.ssh)),
        store=RemoteStore(cluster_name, direct, entrance),
    )


def resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(f"{host} is neither an address nor a name that resolves: {error}") from error


def is_own_address(address: str) -> bool:
    """Tries to bind to the address, which only works on the machine that has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
