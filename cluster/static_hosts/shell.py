"""Runs a shell script on a host of the cluster. The only place that calls `ssh` and translates its failures."""

from __future__ import annotations

import shlex
import subprocess
from typing import Protocol

import msgspec

from tandem.base.errors import TandemError, Unavailable

CONNECT_TIMEOUT_S = 5
_SSH_FAILED = 255  # ssh's own exit status; any other one is the script's
_BEYOND_HEAD_FAILED = 254


class HostUnreachable(Unavailable):
    """ssh could not connect, or did not return in time."""


class ScriptFailed(TandemError):
    """The script ran and failed. `status` is its exit status, `complaint` the last line of its output."""

    def __init__(self, host: str, complaint: str, status: int) -> None:
        super().__init__(f"{host}: {complaint}")
        self.complaint = complaint
        self.status = status


class SshSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str
    private_key: str | None = None  # None: ssh's default keys
    proxy_command: str | None = None


class Shell(Protocol):
    def run(self, address: str, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        """Returns the script's standard output. Raises HostUnreachable or ScriptFailed."""


def ssh_command(settings: SshSettings, address: str, script: str) -> list[str]:
    """Returns ssh's command line. It runs the script with sh, because the host's login shell may be any."""
    options = [
        "BatchMode=yes",  # never asks a question, which would wait for ever without a terminal
        f"ConnectTimeout={CONNECT_TIMEOUT_S}",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=3",
        "StrictHostKeyChecking=accept-new",
        *([f"ProxyCommand={settings.proxy_command}"] if settings.proxy_command else []),
    ]
    key = ["-o", "IdentitiesOnly=yes", "-i", settings.private_key] if settings.private_key else []
    return [
        "ssh",
        *key,
        *(word for option in options for word in ("-o", option)),
        f"{settings.user}@{address}",
        f"sh -c {shlex.quote(script)}",
    ]


class SshShell:
    def __init__(self, settings: SshSettings) -> None:
        self._settings = settings

    def run(self, address: str, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        return _run(ssh_command(self._settings, address, script), f"{self._settings.user}@{address}", stdin, timeout_s)


class LocalShell:
    """Runs scripts on this machine. The address is only used in messages."""

    def run(self, address: str, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        return _run(["sh", "-c", script], address, stdin, timeout_s)


class ThroughHead:
    """Reaches hosts through the head, because only the head may be able to reach them: ssh to the head, and from there ssh to the host."""

    def __init__(self, shell: Shell, head: str, settings_on_head: SshSettings) -> None:
        self._shell = shell
        self._head = head
        self._settings = settings_on_head

    def run(self, address: str, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> bytes:
        onwards = shlex.join(ssh_command(self._settings, address, script))
        # ssh's 255 from the second hop is replaced, so that it does not look as if the head had not answered.
        relayed = f"{onwards}; status=$?; [ $status -ne {_SSH_FAILED} ] || status={_BEYOND_HEAD_FAILED}; exit $status"
        try:
            return self._shell.run(self._head, relayed, stdin=stdin, timeout_s=timeout_s)
        except ScriptFailed as error:
            if error.status == _BEYOND_HEAD_FAILED:
                raise HostUnreachable(f"{address} does not answer the head over ssh: {error.complaint}") from error
            raise ScriptFailed(f"{self._settings.user}@{address}", error.complaint, error.status) from error


def _run(command: list[str], host: str, stdin: bytes, timeout_s: float) -> bytes:
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise HostUnreachable(f"{host} did not answer within {timeout_s:.0f} s") from error
    except OSError as error:
        raise HostUnreachable(f"{command[0]} cannot be started here: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout
    complaint = _last_line(done.stderr) or _last_line(done.stdout) or f"exit status {done.returncode}"
    if command[0] == "ssh" and done.returncode == _SSH_FAILED:
        raise HostUnreachable(f"{host} does not answer over ssh: {complaint}")
    raise ScriptFailed(host, complaint, done.returncode)


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
