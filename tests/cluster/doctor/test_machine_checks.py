"""What the doctor says of GPUs' memory and of NUMA nodes. The kernel's files are written into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.cluster.config import PoolConfig, PoolsConfig, TandemConfig
from tandem.cluster.doctor.gpu_checks import check_gpu_direct, check_nearest, check_pods, gpu_checks
from tandem.cluster.doctor.machine_checks import Finding, Level
from tandem.cluster.doctor.numa_check import check_numa
from tandem.cluster.pools.placement import LocalMachine
from tests.machine import pci_tree
from tests.machine.pci_tree import gpu, rdma, two_sockets

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)  Tue Sep 23 09:55:41 UTC 2025"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri Jan 10 20:00:00 UTC 2025"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def kernel(root: Path, driver: str, linux: str) -> None:
    write(root / "proc/driver/nvidia/version", f"{driver}\nGCC version:  gcc version 11.4.0")
    write(root / "proc/sys/kernel/osrelease", linux)


LOADED = "nvidia-peermem is loaded (driver 535.104.05)"


@pytest.mark.parametrize(
    ("driver", "linux", "module", "level", "what"),
    [
        (CLOSED.format("535.104.05"), "5.4.0-150", "nvidia_peermem", Level.OK, LOADED),
        (CLOSED.format("535.104.05"), "5.4.0-150", "nv_peer_mem", Level.OK, LOADED),
        (OPEN.format("580.95.05"), "6.8.0-79", "", Level.OK, "dma-buf (open kernel modules 580.95.05, Linux 6.8.0-79)"),
        (CLOSED.format("550.135"), "6.8.0", "", Level.WARN, "kernel modules (550.135) are not the open ones"),
        (OPEN.format("510.54"), "6.8.0", "", Level.WARN, "the driver is 510.54, and 515 is needed"),
        (OPEN.format("580.95.05"), "5.4.0-150", "", Level.WARN, "Linux is 5.4.0-150, and 5.12 is needed"),
        (CLOSED.format("550.135"), "5.4.0", "", Level.WARN, "not the open ones and Linux is 5.4.0"),
        ("", "", "", Level.WARN, "kernel modules (unknown) are not the open ones"),
    ],
)
def test_rdma_devices_read_gpus_by_a_module_or_by_dma_buf_and_where_they_do_not_the_reason_is_said(
    driver: str, linux: str, module: str, level: Level, what: str, tmp_path: Path
) -> None:
    kernel(tmp_path, driver, linux)
    (tmp_path / "sys/module" / module).mkdir(parents=True)
    found = check_gpu_direct(tmp_path)
    assert found.level is level
    assert what in found.what
    assert level is Level.OK or "modprobe nvidia-peermem" in found.advice


def test_each_gpu_is_named_with_the_device_beside_it(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    found = check_nearest(tmp_path)
    assert found.level is Level.OK
    assert "0000:15:18.0 → mlx5_0:1 (on its PCI switch)" in found.what
    assert "0000:97:28.0 → mlx5_3:1 (on its PCI switch)" in found.what


def test_a_gpu_without_a_device_on_its_processor_is_worth_a_warning(tmp_path: Path) -> None:
    gpu(tmp_path, "pci0000:15/0000:15:01.0/0000:16:00.0", 0)
    gpu(tmp_path, "pci0000:97/0000:97:01.0/0000:98:00.0", 1)
    rdma(tmp_path, "mlx5_0", "pci0000:15/0000:15:01.0/0000:17:00.0", 0)
    found = check_nearest(tmp_path)
    assert found.level is Level.WARN
    assert "0000:98:00.0 → mlx5_0:1 (on another processor)" in found.what
    assert "other GPUs than 0000:98:00.0" in found.advice


def test_pods_are_told_how_their_gpus_are_reached(tmp_path: Path) -> None:
    own = tmp_path / "proc/self/ns"
    own.mkdir(parents=True)
    (own / "ipc").symlink_to("ipc:[4026531839]")
    (own / "pid").symlink_to("pid:[4026531836]")
    assert "the machine's own IPC and PID namespaces" in check_pods(tmp_path).what
    (own / "ipc").unlink()
    (own / "ipc").symlink_to("ipc:[4026533012]")
    assert "Put all nodes of a machine into one pod" in check_pods(tmp_path).what


def test_what_is_checked_where(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    assert not gpu_checks(tmp_path)  # GPUs that no process here may open
    write(tmp_path / "dev/nvidiactl", "")
    assert gpu_checks(tmp_path).keys() == {"pods", "gpudirect", "nearest"}
    assert gpu_checks(tmp_path / "dev").keys() == set()


def numa_kernel(
    root: Path, cores: Sequence[str], gpus: Sequence[int] = (), rdma: Sequence[int] = (), others: int = 1
) -> None:
    for number, listed in enumerate(cores):
        write(root / f"sys/devices/system/node/node{number}/cpulist", listed)
    for number, node in enumerate(gpus):
        pci_tree.gpu(root, f"pci0000:00/0000:{0x10 + 8 * number:02x}:00.0", node)
    for number in range(others):  # what is no GPU: a bridge, and NVIDIA's own switch
        pci(root, f"0000:f{number}:00.0", "0x8086", "0x060400", 0)
        pci(root, f"0000:e{number}:00.0", "0x10de", "0x068000", 1)
    for number, node in enumerate(rdma):
        pci_tree.rdma(root, f"mlx5_{number}", f"pci0000:00/0000:{0x80 + number:02x}:00.0", node)


def pci(root: Path, address: str, vendor: str, kind: str, node: int) -> None:
    folder = root / "sys/bus/pci/devices" / address
    write(folder / "vendor", vendor)
    write(folder / "class", kind)
    write(folder / "numa_node", str(node))


def found_on(
    root: Path, cores: int, *, gpus: int = 0, usable: Sequence[int] | None = None, **pools: PoolConfig
) -> Finding:
    asked = PoolsConfig(**{"prefill": PoolConfig(nodes=1), "decode": PoolConfig(nodes=1), **pools})
    machine = LocalMachine(tuple(range(cores)) if usable is None else tuple(usable), gpus)
    return check_numa(TandemConfig(pools=asked), machine, root)


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        ([], "the kernel reports no NUMA nodes"),
        (["0-7"], "one NUMA node: all memory is equally near"),
        (["0-3", "4-7", ""], "2 NUMA nodes: 4 cores on 0; 4 cores on 1"),  # the third is memory alone
    ],
)
def test_nodes_that_keep_to_one_numa_node_each_are_in_order(tmp_path: Path, nodes: list[str], what: str) -> None:
    numa_kernel(tmp_path, nodes)
    found = found_on(tmp_path, 8)
    assert (found.level, found.what) == (Level.OK, what)


def test_cores_of_two_numa_nodes_are_worth_a_warning(tmp_path: Path) -> None:
    numa_kernel(tmp_path, ["0-3", "4-7"])
    three = PoolConfig(nodes=1, threads=3)
    found = found_on(tmp_path, 8, prefill=three, decode=three)
    assert found.level is Level.WARN
    assert "decode-0's 3 cores lie on NUMA nodes 0 and 1" in found.what
    assert "`threads` that divide a NUMA node's 4 cores" in found.advice
    found = found_on(tmp_path, 8, prefill=PoolConfig(nodes=0))
    assert "decode-0 has more cores than a NUMA node (8 on 0 and 1)" in found.what
    assert "ranks" in found.advice


def test_hardware_threads_are_counted_where_they_lie(tmp_path: Path) -> None:
    numa_kernel(tmp_path, ["0-1,4-5", "2-3,6-7"])
    assert found_on(tmp_path, 8, usable=[0, 4, 1, 5, 2, 6, 3, 7]).level is Level.OK


@pytest.mark.parametrize(
    ("lie", "level"),
    [
        ([0, 0, 1, 1], Level.OK),
        ([0, 0, 0, 1], Level.WARN),  # decode-0 has the last two
        ([-1, -1, -1, -1], Level.OK),  # a virtual machine
    ],
)
def test_a_nodes_gpus_are_held_against_numa_nodes(tmp_path: Path, lie: list[int], level: Level) -> None:
    numa_kernel(tmp_path, ["0-3", "4-7"], gpus=lie)
    pool = PoolConfig(nodes=1, tensor_parallel=2)
    found = found_on(tmp_path, 8, gpus=4, prefill=pool, decode=pool)
    assert found.level is level
    assert ("decode-0's 2 GPUs lie on NUMA nodes 0 and 1" in found.what) is (level is Level.WARN)


def test_gpus_far_from_the_cores_that_serve_them_are_named(tmp_path: Path) -> None:
    numa_kernel(tmp_path, ["0-3", "4-7"], gpus=[1])
    found = found_on(tmp_path, 4, gpus=1, usable=range(4))
    assert "prefill-0 computes on a GPU of NUMA node 1, and its cores are of 0" in found.what
    assert "single-numa-node" in found.advice


def test_gpus_without_an_rdma_device_beside_them_are_named(tmp_path: Path) -> None:
    numa_kernel(tmp_path, ["0-3", "4-7"], gpus=[0, 1], rdma=[0])
    found = found_on(tmp_path, 8, gpus=2)
    assert "4 cores, 1 GPU, mlx5_0 on 0" in found.what
    assert "the GPUs of NUMA node 1 have no RDMA device beside them" in found.what
    assert found_on(tmp_path, 8, gpus=1).level is Level.OK, "those that this process does not see are not guessed about"
