"""Tests whether NIXL works on this machine: moves a megabyte between two agents. It does so in a process of its own,
because NIXL writes to the terminal, and a broken plug-in may end the process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tandem.kvtransfer.nixl.lanes import lanes_in

_BYTES = 1 << 20
_DEADLINE_S = 20.0
_BACKEND = "UCX"


class NixlReport(msgspec.Struct, frozen=True):
    version: str = ""
    plugins: list[str] = []  # those in the package; not every machine can load all of them
    transports: list[str] = []  # those that UCX chose between two agents here
    gigabytes_per_s: float = 0.0
    error: str = ""


class _MoveResult(msgspec.Struct, frozen=True):
    plugins: list[str]
    gigabytes_per_s: float


def check(timeout_s: float = 60.0, device: str = "") -> NixlReport:
    """Moves host memory between two agents of one process; with `device`, that device's memory between two processes.
    Waits at most `timeout_s`."""
    try:
        version = importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError:
        return NixlReport(error="the package nixl is not installed")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ucx.log"
        try:
            child = subprocess.run(
                [sys.executable, "-P", "-m", "tandem.kvtransfer.nixl_check", *([device] if device else [])],
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
            return NixlReport(version, error=words[-1] if words else f"it ended with status {child.returncode}")
        moved = msgspec.json.decode(child.stdout, type=_MoveResult)
        # UCX writes its log when the process ends.
        transports = lanes_in(log.read_text(errors="replace")) if log.exists() else []
        return NixlReport(version, moved.plugins, transports, moved.gigabytes_per_s)


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
        _transfer(sender, handle)  # the first transfer connects
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
    # NIXL has no event for a completed transfer: its API is to poll.
    while state == "PROC":
        if time.perf_counter() - began > _DEADLINE_S:
            raise TimeoutError(f"a transfer of {_BYTES} bytes did not complete within {_DEADLINE_S:.0f} s")
        state = agent.check_xfer_state(handle)  # type: ignore[attr-defined]
    if state != "DONE":
        raise RuntimeError(f"the transfer ended as {state}")
    return time.perf_counter() - began


def _address(buffer: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


class _Offer(msgspec.Struct, frozen=True):
    metadata: bytes
    address: int


def _on_device(device: str) -> tuple[list[str], float]:
    """Moves between two processes, as nodes do: within one process UCX reaches a GPU's memory in another way."""
    agent, tensor = _agent_on("sender", device)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_LOG")}
    command = [sys.executable, "-P", "-m", "tandem.kvtransfer.nixl_check", device, "receive"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as receiver:
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        line = receiver.stdout.readline()
        if not line:
            raise RuntimeError(f"a second process cannot use NIXL with {device}")
        offered = msgspec.json.decode(line, type=_Offer)
        peer = agent.add_remote_agent(offered.metadata)
        kind, number = _kind_of(tensor)
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(tensor.data_ptr(), _BYTES, number)], kind),
            agent.get_xfer_descs([(offered.address, _BYTES, number)], kind),
            peer.decode() if isinstance(peer, bytes) else peer,
        )
        _transfer(agent, handle)
        seconds = _transfer(agent, handle)
        agent.release_xfer_handle(handle)
        receiver.stdin.write(b"look\n")
        receiver.stdin.close()
        if receiver.stdout.readline() != b"arrived\n":
            raise RuntimeError("the bytes that arrived are not the bytes that were sent")
    return sorted(agent.get_plugin_list()), _BYTES / seconds / 1e9


def _receive(device: str, out: BinaryIO) -> None:
    agent, tensor = _agent_on("receiver", device)
    tensor.zero_()
    if tensor.is_cuda:
        tensor.sum().item()  # waits, so that the zeros are written before anything arrives
    offered = _Offer(agent.get_agent_metadata(), tensor.data_ptr())
    out.write(msgspec.json.encode(offered) + b"\n")
    out.flush()
    sys.stdin.readline()
    out.write(b"arrived\n" if bool((tensor == 7).all()) else b"wrong\n")
    out.flush()


def _agent_on(name: str, device: str) -> tuple[Any, Any]:
    # Imported here, because moves of host memory do not need it.
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    tensor = torch.full((_BYTES,), 7, dtype=torch.uint8, device=device)
    kind, number = _kind_of(tensor)
    agent = nixl_agent(name, nixl_agent_config(backends=[_BACKEND]))
    agent.register_memory([(tensor.data_ptr(), _BYTES, number, "")], kind)
    return agent, tensor


def _kind_of(tensor: Any) -> tuple[str, int]:
    return ("VRAM", tensor.get_device()) if tensor.is_cuda else ("DRAM", 0)


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # NIXL prints to stdout, which must have the result alone
    if "receive" in sys.argv:
        _receive(sys.argv[1], out)
        return
    plugins, speed = _on_device(sys.argv[1]) if len(sys.argv) > 1 else _loop_back()
    out.write(msgspec.json.encode(_MoveResult(plugins, speed)))
    out.flush()


if __name__ == "__main__":
    main()
