"""A command and all processes that it started, and child processes of this module's own. Linux only.

Servers put their processes into sessions of their own, rename them and let them outlive their parents. But orphans are adopted by their nearest
ancestor that asked for them: after `adopt_orphans`, everything that this process starts stays below it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from tandem.base.errors import DeadlineExceeded, Unavailable

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.1
_LOG_TAIL_LINES = 15
_ANSWER_S = 180.0
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class _Process:
    id: int
    name: str
    parent: int
    ended: bool  # it is a zombie until its parent waits for it


def adopt_orphans() -> None:
    """Call this once, before the first command."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot adopt orphaned processes")


def descendants(ancestor: int, except_below: Collection[int] = ()) -> dict[int, str]:
    """Returns the living processes below this one, with their names. Leaves out the excepted ones and everything below them."""
    processes = _all_processes()
    below: dict[int, list[int]] = {}
    for process in processes.values():
        below.setdefault(process.parent, []).append(process.id)
    found: dict[int, str] = {}
    unseen = list(below.get(ancestor, ()))
    while unseen:
        process = processes[unseen.pop()]
        if process.id in except_below:
            continue
        unseen += below.get(process.id, ())
        if not process.ended:
            found[process.id] = process.name
    return found


class Family:
    """One command. Only one at a time, because every process that starts below this one belongs to it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._others = frozenset(descendants(os.getpid()))
        with (folder / "output.log").open("wb") as log:
            self._leader = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches this process only
            )

    def members(self) -> dict[int, str]:
        return descendants(os.getpid(), except_below=self._others)

    def failed(self) -> int | None:
        """Returns the exit status of a command that failed; None otherwise. A command that succeeded may have left its server running."""
        status = self._leader.poll()
        return status or None

    def tail(self) -> str:
        """Returns the end of what the family's processes wrote into their folder."""
        ends = []
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            ends.append("\n".join([f"--- {log.name}", *lines]))
        return "\n".join(ends)

    def stop(self, patience_s: float) -> None:
        """Ends the command first, so that it can end the others; then the processes that are left, then by force. Raises if a process is
        still left."""
        if self._leader.poll() is None:
            self._leader.send_signal(signal.SIGTERM)
        else:
            self._signal_all(signal.SIGTERM)
        if self._all_gone(patience_s):
            return
        self._signal_all(signal.SIGTERM)
        if self._all_gone(patience_s / 2):
            return
        self._signal_all(signal.SIGKILL)
        if not self._all_gone(patience_s):
            left = ", ".join(f"{name} ({process})" for process, name in self.members().items())
            raise Unavailable(f"these processes do not end: {left}")

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.members():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def _all_gone(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while True:
            self._leader.poll()
            _bury_orphans(self._leader.pid)
            if not self.members():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)


def _bury_orphans(leader: int) -> None:
    """Waits for adopted processes that have ended. The leader is left to subprocess."""
    for process in _all_processes().values():
        if process.ended and process.parent == os.getpid() and process.id != leader:
            with suppress(ChildProcessError):
                os.waitpid(process.id, os.WNOHANG)


def _all_processes() -> dict[int, _Process]:
    found: dict[int, _Process] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it is gone already
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                state, parent = rest.split()[:2]
                found[int(entry.name)] = _Process(int(entry.name), name, int(parent), state in "ZX")
    return found


def output_of(command: Sequence[str | Path], within_s: float) -> str:
    """Runs a peer's command, and returns what it printed. Raises DeadlineExceeded or Unavailable."""
    what = Path(command[0]).name
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"{what} did not end within {within_s:.0f} s") from error
    except OSError as error:
        raise Unavailable(f"{what} did not start: {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-2000:]
        raise Unavailable(f"{what} ended with status {done.returncode}:\n{said}")
    return done.stdout.decode(errors="replace")


def wait_for(answer: Callable[[], Found | None], within_s: float, what: str) -> Found:
    """Asks again and again, until there is an answer. Raises DeadlineExceeded with `what`, which was waited for."""
    deadline = time.monotonic() + within_s
    while not (found := answer()):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what} within {within_s:.0f} s")
        time.sleep(_LOOK_EVERY_S)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


@contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Runs `work` in a process of its own, with the other end of the pipe before its arguments. It must end when the pipe is closed."""
    process, ours = _spawn(work, *arguments)
    try:
        yield ours
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.terminate()


def _serve_calls(calls: Connection, kind: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    made = kind(*arguments)
    while True:
        name, words = calls.recv()
        calls.send(getattr(made, name)(*words))
        if name == "close":
            return


class Remote:
    """An object in a process of its own. It must have `close`."""

    def __init__(self, kind: Callable[..., Any], *arguments: Any) -> None:
        self._process, self._calls = _spawn(_serve_calls, kind, arguments)

    def begin(self, name: str, *arguments: Any) -> None:
        self._calls.send((name, arguments))

    def result(self) -> Any:
        if not self._calls.poll(_ANSWER_S):
            raise TimeoutError("a benchmark process did not answer")
        return self._calls.recv()

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.result()

    def close(self) -> None:
        self.call("close")
        self._process.join(10)

    def kill(self) -> None:
        """Ends the process without `close`, which may wait for others."""
        self._process.kill()
        self._process.join(10)
