"""Which way blocks go: the lanes that UCX chose, from its own log.

NIXL has no question for that, and UCX falls back in silence: where CUDA's IPC and RDMA are both out of reach, keys and
values on a GPU are staged through host memory and sent over TCP, a hundred times slower. UCX names its lanes in its log
when a connection is made. The log goes to memory of this process, and is read there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys

logger = logging.getLogger(__name__)

# Lanes that reach a GPU's memory by themselves, by what their names begin with.
_DIRECT = ("cuda_ipc", "rc", "dc", "ud_mlx5", "gga", "srd", "rocm_ipc", "ze_ipc")


def lanes_in(ucx_log: str) -> list[str]:
    """From lines such as "... intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)". A process's connection to itself
    is not among them."""
    found: set[str] = set()
    for line in ucx_log.splitlines():
        if "cfg#" in line and "self cfg#" not in line:
            for lanes in re.findall(r"\w+\(([^)]*)\)", line):
                found.update(lanes.split())
    return sorted(found)


def reaches_device(lanes: list[str]) -> bool:
    return any(lane.startswith(_DIRECT) for lane in lanes)


class LaneLog:
    """One for a process: UCX reads where its log goes when it is loaded. Where the user has set that, or UCX was there
    before, nothing is known."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._read = 0
        self._set: list[str] = []

    def before_loading(self) -> None:
        given = any(name in os.environ for name in ("UCX_LOG_LEVEL", "UCX_LOG_FILE"))
        if (
            self._file is not None
            or given
            or "nixl._bindings" in sys.modules
            or not hasattr(os, "memfd_create")
        ):
            return
        self._file = os.memfd_create("ucx-log")
        os.environ["UCX_LOG_LEVEL"], os.environ["UCX_LOG_FILE"] = "info", f"/proc/self/fd/{self._file}"
        self._set = ["UCX_LOG_LEVEL", "UCX_LOG_FILE"]

    def after_loading(self) -> None:
        """What processes begun by this one load must not be told of our file."""
        for name in self._set:
            os.environ.pop(name, None)
        self._set = []

    def new_lanes(self) -> list[str]:
        """The lanes of connections made since the last call."""
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
    """To the node's log, when the first blocks have moved to or from a peer."""
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
