"""What the doctor says of how GPUs' memory leaves a machine. The kernel's files are written into a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster.doctor.gpu_checks import check_gpu_direct, check_nearest, check_pods, gpu_checks
from tandem.cluster.doctor.machine_checks import Level
from tests.machine.pci_tree import gpu, rdma, two_sockets

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)  Tue Sep 23 09:55:41 UTC 2025"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri Jan 10 20:00:00 UTC 2025"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def kernel(root: Path, driver: str, linux: str) -> None:
    write(root / "proc/driver/nvidia/version", f"{driver}\nGCC version:  gcc version 11.4.0")
    write(root / "proc/sys/kernel/osrelease", linux)


@pytest.mark.parametrize(
    ("driver", "linux", "module", "what"),
    [
        (CLOSED.format("535.104.05"), "5.4.0-150", "nvidia_peermem", "nvidia-peermem is loaded (driver 535.104.05)"),
        (CLOSED.format("535.104.05"), "5.4.0-150", "nv_peer_mem", "nvidia-peermem is loaded (driver 535.104.05)"),
        (OPEN.format("580.95.05"), "6.8.0-79", "", "dma-buf (open kernel modules 580.95.05, Linux 6.8.0-79)"),
    ],
)
def test_rdma_devices_read_gpus_by_a_module_or_by_dma_buf(
    driver: str, linux: str, module: str, what: str, tmp_path: Path
) -> None:
    kernel(tmp_path, driver, linux)
    (tmp_path / "sys/module" / module).mkdir(parents=True)
    found = check_gpu_direct(tmp_path)
    assert found.level is Level.OK
    assert found.what.startswith(what)


@pytest.mark.parametrize(
    ("driver", "linux", "why"),
    [
        (CLOSED.format("550.135"), "6.8.0", "kernel modules (550.135) are not the open ones"),
        (OPEN.format("510.54"), "6.8.0", "the driver is 510.54, and 515 is needed"),
        (OPEN.format("580.95.05"), "5.4.0-150", "Linux is 5.4.0-150, and 5.12 is needed"),
        (CLOSED.format("550.135"), "5.4.0", "not the open ones and Linux is 5.4.0"),
        ("", "", "kernel modules (unknown) are not the open ones"),
    ],
)
def test_a_machine_that_does_neither_is_told_why(driver: str, linux: str, why: str, tmp_path: Path) -> None:
    kernel(tmp_path, driver, linux)
    found = check_gpu_direct(tmp_path)
    assert found.level is Level.WARN
    assert why in found.what
    assert "modprobe nvidia-peermem" in found.advice


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
