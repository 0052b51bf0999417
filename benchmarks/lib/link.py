"""Two machines made of network namespaces, with a link of some rate between them. Needs root, `ip` and `tc`."""

from __future__ import annotations

import ctypes
import os
import subprocess
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_ENDS = {"tdm_bench_p": "10.79.0.1", "tdm_bench_c": "10.79.0.2"}


class Link:
    names = tuple(_ENDS)  # of the namespaces

    def __init__(self, rate: str) -> None:
        self._rate = rate

    def limit(self, rate: str) -> None:
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate,
                 "burst", "1mb", "latency", "200ms")  # fmt: skip

    def __enter__(self) -> Link:
        self._remove()
        names = self.names
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", "eth0", "netns", names[0], "type", "veth",
             "peer", "name", "eth0", "netns", names[1])  # fmt: skip
        for name, address in _ENDS.items():
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        self.limit(self._rate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in _ENDS:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def enter(namespace: str) -> str:
    """Moves this thread, and threads that it starts later, to that machine. Returns its address. UCX must use the network: it would otherwise
    find out that both machines are one."""
    with open(f"/run/netns/{namespace}", "rb") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.environ["UCX_TLS"] = "tcp"
    return _ENDS[namespace]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
