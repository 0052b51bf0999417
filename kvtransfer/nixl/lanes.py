"""Says over which lanes blocks move: those that UCX chose, read from its own log.

NIXL cannot be asked for them, and UCX falls back silently: if neither CUDA's IPC nor RDMA is in reach, it stages KV
on a GPU through host memory and sends it over TCP, a hundred times slower. UCX logs its lanes when it makes a
connection. Here the log goes to memory of this process, which reads it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys

logger = logging.getLogger(__name__)

# The beginnings of the names of lanes that reach a GPU's memory by themselves.
_DIRECT = ("cuda_ipc", "rc", "dc", "ud_mlx5", "gga", "srd", "rocm_ipc", "ze_ipc")


def lanes_in(ucx_log: str) -> list[str]:
    """Returns the lanes in lines such as "... intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)", without those
    of a process's connection to itself."""
    found: set[str] = set()
    for line in ucx_log.splitlines():
        if "cfg#" in line and "self cfg#" not in line:
            for lanes in re.findall(r"\w+\(([^)]*)\)", line):
                found.update(lanes.split())
    return sorted(found)


def reaches_device(lanes: list[str]) -> bool:
    return any(lane.startswith(_DIRECT) for lane in lanes)


class LaneLog:
    """UCX's log in this process. UCX decides where its log goes when it is loaded, so there is one. It stays empty
    if the operator has set UCX's log variables, or if UCX was loaded before."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._read = 0
        self._set: list[str] = []

    def before_loading(self) -> None:
        given = any(name in os.environ for name in ("UCX_LOG_LEVEL", "UCX_LOG_FILE"))
        if self._file is not None or given or "nixl._bindings" in sys.modules or not hasattr(os, "memfd_create"):
            return
        self._file = os.memfd_create("ucx-log")
        os.environ["UCX_LOG_LEVEL"], os.environ["UCX_LOG_FILE"] = "info", f"/proc/self/fd/{self._file}"
        self._set = ["UCX_LOG_LEVEL", "UCX_LOG_FILE"]

    def after_loading(self) -> None:
        """Removes the variables, because child processes that load UCX must not write to our file."""
        for name in self._set:
            os.environ.pop(name, None)
        self._set = []

    def new_lanes(self) -> list[str]:
        """Returns the lanes of connections made since the last call."""
        if self._file is None:
            return []
        ctypes.CDLL(None).fflush(None)  # UCX writes through the C library's buffers
        size = os.fstat(self._file).st_size
        text = os.pread(self._file, size - self._read, self._read).decode(errors="replace")
        self._read = size
        return lanes_in(text)


LANE_LOG = LaneLog()
_warned = False


def name_lanes(peer: str, *, on_device: bool) -> None:
    """Logs the lanes to a peer, when the first blocks have moved to or from it."""
    global _warned
    lanes = LANE_LOG.new_lanes()
    if not lanes:
        return
    logger.info("blocks to and from %s go over %s", peer, ", ".join(lanes))
    if on_device and not reaches_device(lanes) and not _warned:
        _warned = True
        logger.warning(
            "keys and values on the GPU go over %s, staged through host memory piece by piece: some 1 to 3 GB/s. On one "
            "machine CUDA's IPC is out of reach (separate containers, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments), "
            "between machines RDMA",
            ", ".join(lanes),
        )
