"""Who a node is to its peers: its incarnation, what its requests' tokens are known by, and which process of which machine it is.

The end of a process on this machine is proof that it writes nothing any more: the kernel has taken its memory and its
sockets. It can be seen from the same PID namespace alone: a container has its own. A refused connection or a lost answer
is no such proof.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from tandem.wire.handoff import Envelope, ProcessIdentity

Clock = Callable[[], float]
V = TypeVar("V")


class PeerKey(NamedTuple):
    """One incarnation of one node."""

    node_id: str
    epoch: int


def key_of(envelope: Envelope) -> PeerKey:
    return PeerKey(envelope.sender_id, envelope.sender_epoch)


class Identity(NamedTuple):
    node_id: str
    epoch: int
    endpoint: str

    def envelope(self, receiver_epoch: int) -> Envelope:
        return Envelope(
            sender_id=self.node_id,
            sender_epoch=self.epoch,
            receiver_epoch=receiver_epoch,
            reply_to=self.endpoint,
        )


def token_hash(token_ids: Sequence[int], cache_salt: str | None, lora: str | None) -> bytes:
    """What both nodes must agree on before one's KV becomes the other's: the same tokens under the same model.

    Over all tokens, independent of block size, so that nodes with different blocks can compare.
    """
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes())
    for part in (cache_salt, lora):
        encoded = b"" if part is None else part.encode()
        digest.update(b"\0" if part is None else b"\1")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


class BoundedMemory(Generic[V]):
    """A bounded memory of things that are over, so that what comes late is recognised as late."""

    def __init__(self, limit: int, seconds: float, clock: Clock) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, V]] = OrderedDict()

    def add(self, key: str, value: V) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._seconds, value)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: str) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        expires, value = entry
        if expires <= self._clock():
            del self._entries[key]
            return None
        return value


_PROC = Path("/proc")
_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat, counted from after the command's name


def this_process() -> ProcessIdentity:
    started = _stat("self")[_STARTED]
    return ProcessIdentity(
        machine=_machine(), pid_namespace=_pid_namespace(), pid=os.getpid(), started=int(started)
    )


def has_ended(process: ProcessIdentity) -> bool:
    """True only when it is certain: the process is one of this machine and of this PID namespace, and /proc shows that one.
    A number means another process in another namespace."""
    try:
        if (process.machine, process.pid_namespace) != (
            _machine(),
            _pid_namespace(),
        ) or not _shows_our_namespace():
            return False
        fields = _stat(str(process.pid))
        if int(fields[_STARTED]) != process.started:
            return True  # the number has been given to another process
        # A process of several threads that is being killed is a zombie while the others still run.
        return fields[_STATE] in ("Z", "X") and len(os.listdir(_PROC / str(process.pid) / "task")) <= 1
    except FileNotFoundError:
        return _is_unused(process.pid)
    except OSError:
        return False


def _is_unused(pid: int) -> bool:
    """/proc may hide the processes of other users; the kernel does not hide that there is one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _shows_our_namespace() -> bool:
    """A /proc that was mounted for an outer namespace shows the numbers that processes have there: ours would be two."""
    for line in (_PROC / "self/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) == 2
    return False


def _stat(pid: str) -> list[str]:
    # The name stands in parentheses and may hold anything, parentheses and spaces too.
    return (_PROC / pid / "stat").read_text().rpartition(")")[2].split()


def _machine() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat(_PROC / "self/ns/pid").st_ino
