"""The log says which way blocks take, and warns if a GPU's memory takes the slow one; and the settings that UCX needs for the fast one."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tandem.kvtransfer import nixl_check
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl import lanes
from tandem.kvtransfer.nixl.lanes import lanes_in, name_lanes, reaches_device
from tandem.kvtransfer.nixl.transport import NixlTransport
from tandem.kvtransfer.protocol.transport import Move, Operation
from tests.engine.model.fake_device import CUDA, FakeDevice

LOG = """\
[1] [vm:1:0] ucp_worker.c:1997 UCX INFO  d-1 self cfg#0 rma(cuda_copy/cuda)
[1] [vm:1:0] ucp_worker.c:1997 UCX INFO  d-1 intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)
[1] [vm:1:0] ucp_worker.c:1997 UCX INFO  d-1 inter-node cfg#2 rma(rc_mlx5/mlx5_0:1) am(rc_mlx5/mlx5_0:1)
"""


def test_lanes_are_those_to_others() -> None:
    assert lanes_in(LOG) == ["cma/memory", "rc_mlx5/mlx5_0:1", "tcp/lo"]
    assert lanes_in("nothing of the kind") == []


@pytest.mark.parametrize(
    ("found", "direct"),
    [
        (["tcp/eth0", "cuda_copy/cuda", "cma/memory"], False),
        (["cuda_ipc/cuda", "tcp/eth0"], True),
        (["rc_mlx5/mlx5_0:1"], True),
        (["gdr_copy/cuda", "tcp/eth0"], False),
    ],
)
def test_what_reaches_a_gpus_memory(found: list[str], direct: bool) -> None:
    assert reaches_device(found) is direct


@pytest.mark.parametrize(
    ("found", "on_device", "warned"),
    [(["tcp/eth0"], False, False), (["tcp/eth0"], True, True), (["cuda_ipc/cuda", "tcp/eth0"], True, False)],
)
def test_a_gpus_memory_over_tcp_is_warned_of_once(
    found: list[str], on_device: bool, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "_warned", False)
    monkeypatch.setattr(lanes.LANE_LOG, "new_lanes", lambda: found)
    with caplog.at_level(logging.INFO):
        for peer in ("p-1", "p-2"):
            name_lanes(peer, on_device=on_device)
    said = [record for record in caplog.records if record.levelname == "INFO"]
    assert [record.getMessage() for record in said] == [
        f"blocks to and from {peer} go over {', '.join(found)}" for peer in ("p-1", "p-2")
    ]
    assert [record.levelname for record in caplog.records].count("WARNING") == warned


class Agent:
    """The part of NIXL that is called here. It notes whether the calling thread had used the device before."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._launched: dict[int, int] = {}
        self.with_context: list[tuple[str, bool]] = []

    def _note(self, what: str) -> None:
        thread = threading.get_ident()
        self.with_context.append((what, self._device.default.given > self._launched.get(thread, 0)))
        self._launched[thread] = self._device.default.given

    def register(self, *_: Any) -> None:
        self._note("register")

    def metadata(self) -> bytes:
        return b"here"

    def add_remote(self, _: bytes) -> str:
        self._note("add_remote")
        return "there"

    def prepare(self, *_: Any) -> int:
        return 1

    def start(self, *_: Any) -> tuple[int, bool]:
        return 1, True

    def release(self, _: int) -> None: ...


def test_each_thread_has_used_the_device_before_it_calls_nixl() -> None:
    device = FakeDevice()
    agent = Agent(device)
    with device.present(), torch.inference_mode():
        cache = torch.zeros(4, 1, 2, 1, 4, 8, device=CUDA)
        object.__setattr__(cache, "data_ptr", lambda: 4096)
        object.__setattr__(cache, "get_device", lambda: 0)
        transport = NixlTransport(agent)  # type: ignore[arg-type]
        mine = transport.register(KVCacheMemory(cache, "m", 1, 1, 1000))
        assert (mine.memory_type, mine.device_id) == ("VRAM", 0)

    def shake_hands() -> None:
        with device.present(), torch.inference_mode():
            remote = transport.connect(mine)
            ids = np.array([1])
            assert transport.is_done(transport.post(remote, Move(Operation.WRITE, "t", mine.block_bytes, ids, ids)))

    thread = threading.Thread(target=shake_hands)
    thread.start()
    thread.join()
    assert agent.with_context == [("register", True), ("add_remote", True)]


@pytest.mark.slow
def test_a_process_hears_which_lanes_ucx_chose() -> None:
    code = """
import numpy as np, torch
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl.transport import NixlAgent
from tandem.kvtransfer.nixl.lanes import LANE_LOG
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.transport import NixlTransport
from tandem.kvtransfer.protocol.transport import Move, Operation
import logging, os; logging.basicConfig(level="INFO")
a, b = (NixlTransport(NixlAgent(name, NixlOptions())) for name in ("here", "there"))
caches = [torch.zeros(8, 2, 2, 1, 4, 8) for _ in range(2)]
mine, theirs = (t.register(KVCacheMemory(cache, "m", 2, 1, 1000)) for t, cache in zip((a, b), caches))
ids = np.array([1])
handle = a.post(a.connect(theirs), Move(Operation.WRITE, "t", mine.block_bytes, ids, ids))
while not a.is_done(handle): pass
a.close(); b.close()
assert not any(name.startswith("UCX_LOG") for name in os.environ)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if "go over" in line]
    assert "blocks to and from there go over" in line
    assert "/" in line.partition("go over")[2]


@pytest.mark.slow
def test_two_processes_are_checked_on_a_device() -> None:
    """On the CPU here, as a device like any other."""
    report = nixl_check.check(60, "cpu")
    assert report.error == ""
    assert report.transports
    assert report.gigabytes_per_s > 0
