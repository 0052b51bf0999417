"""Does NIXL work on this machine? Moves a megabyte between two agents, in a process of its own: NIXL writes to
the terminal, and what is wrong with a plug-in may take the process with it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

_BYTES = 1 << 20
_DEADLINE_S = 20.0
_BACKEND = "UCX"


class NixlReport(msgspec.Struct, frozen=True):
    version: str = ""
    plugins: list[str] = []  # that the package brings; not all can be loaded everywhere
    transports: list[str] = []  # that UCX chose between two agents here
    gigabytes_per_s: float = 0.0
    error: str = ""


class _Moved(msgspec.Struct, frozen=True):
    plugins: list[str]
    gigabytes_per_s: float


def check(timeout_s: float = 60.0) -> NixlReport:
    try:
        version = importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError:
        return NixlReport(error="the package nixl is not installed")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ucx.log"
        try:
            child = subprocess.run(
                [sys.executable, "-m", "tandem.kvtransfer.nixl_check"],
                env={**os.environ, "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": str(log)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return NixlReport(version, error=f"it did not finish within {timeout_s:.0f} s")
        if child.returncode != 0:
            words = child.stderr.decode(errors="replace").strip().splitlines()
            return NixlReport(
                version, error=words[-1] if words else f"it ended with status {child.returncode}"
            )
        moved = msgspec.json.decode(child.stdout, type=_Moved)
        # UCX writes its log when the process ends.
        transports = transports_in(log.read_text(errors="replace")) if log.exists() else []
        return NixlReport(version, moved.plugins, transports, moved.gigabytes_per_s)


def transports_in(ucx_log: str) -> list[str]:
    """From lines such as "... intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)"."""
    found: set[str] = set()
    for line in ucx_log.splitlines():
        if "cfg#" in line and "self cfg#" not in line:
            for lanes in re.findall(r"\w+\(([^)]*)\)", line):
                found.update(lanes.split())
    return sorted(found)


def _loop_back() -> tuple[list[str], float]:
    from nixl._api import nixl_agent, nixl_agent_config

    source, target = bytearray(os.urandom(_BYTES)), bytearray(_BYTES)
    sender = nixl_agent("sender", nixl_agent_config(backends=[_BACKEND]))
    receiver = nixl_agent("receiver", nixl_agent_config(backends=[_BACKEND]))
    here, there = _address(source), _address(target)
    registered = (
        (sender, sender.register_memory([(here, _BYTES, 0, "")], "DRAM")),
        (receiver, receiver.register_memory([(there, _BYTES, 0, "")], "DRAM")),
    )
    peer = sender.add_remote_agent(receiver.get_agent_metadata())
    handle = sender.initialize_xfer(
        "WRITE",
        sender.get_xfer_descs([(here, _BYTES, 0)], "DRAM"),
        sender.get_xfer_descs([(there, _BYTES, 0)], "DRAM"),
        peer.decode() if isinstance(peer, bytes) else peer,
    )
    try:
        _transfer(sender, handle)  # the first one connects
        seconds = _transfer(sender, handle)
    finally:
        sender.release_xfer_handle(handle)
        for agent, memory in registered:
            agent.deregister_memory(memory)
    if source != target:
        raise RuntimeError("the bytes that arrived are not the bytes that were sent")
    return sorted(sender.get_plugin_list()), _BYTES / seconds / 1e9


def _transfer(agent: object, handle: object) -> float:
    began = time.perf_counter()
    state = agent.transfer(handle)  # type: ignore[attr-defined]
    # NIXL has no event for a completed transfer: its own API is to ask.
    while state == "PROC":
        if time.perf_counter() - began > _DEADLINE_S:
            raise TimeoutError(f"a transfer of {_BYTES} bytes did not complete within {_DEADLINE_S:.0f} s")
        state = agent.check_xfer_state(handle)  # type: ignore[attr-defined]
    if state != "DONE":
        raise RuntimeError(f"the transfer ended as {state}")
    return time.perf_counter() - began


def _address(buffer: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what NIXL prints is not ours to pass on
    plugins, speed = _loop_back()
    out.write(msgspec.json.encode(_Moved(plugins, speed)))
    out.flush()


if __name__ == "__main__":
    main()
