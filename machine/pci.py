"""How near this machine's PCI devices are to each other, as the kernel describes them in sysfs: GPUs and RDMA devices."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # the PCI class of GPUs begins like this: VGA or 3D controller
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Distance(enum.IntEnum):
    SWITCH = 0  # both hang on one PCI switch: what passes between them does not reach a processor
    ROOT = 1  # on one of the processor's PCI roots
    NUMA = 2  # on one NUMA node
    MACHINE = 3  # on different processors, or the kernel does not say


@dataclass(frozen=True, slots=True)
class PciDevice:
    name: str  # a GPU's PCI address; an RDMA device's name
    path: tuple[str, ...]  # the PCI addresses of the bridges above it, from its root on, and its own
    numa: int  # -1: unknown


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    device: PciDevice
    # The active ones, as UCX names them: mlx5_0:1. None if this process may not open the device, as in a pod that was given another.
    ports: tuple[str, ...]


def gpus(root: Path = ROOT) -> list[PciDevice]:
    """In the order of the bus, which is CUDA's order for GPUs of one kind. `root` is where the kernel's file systems lie."""
    return [
        _device(folder, folder.name)
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if read_text(folder / "vendor") == _NVIDIA and read_text(folder / "class").startswith(_DISPLAY)
    ]


def rdma_devices(root: Path = ROOT) -> list[RdmaDevice]:
    return [
        RdmaDevice(
            _device(folder / "device", folder.name),
            tuple(
                f"{folder.name}:{port.name}"
                for port in sorted((folder / "ports").glob("*"))
                if "ACTIVE" in read_text(port / "state") and _may_open(folder / "device", root)
            ),
        )
        for folder in sorted((root / "sys/class/infiniband").glob("*"))
    ]


def _may_open(device: Path, root: Path) -> bool:
    verbs = [each.name for each in (device / "infiniband_verbs").glob("uverbs*")]
    return any(os.access(root / "dev/infiniband" / name, os.R_OK | os.W_OK) for name in verbs)


def _device(folder: Path, name: str) -> PciDevice:
    real = folder.resolve()
    path = tuple(part for part in real.parts if part.startswith("pci") or _ADDRESS.fullmatch(part))
    text = read_text(folder / "numa_node")
    return PciDevice(name, path, int(text) if text.isdigit() else -1)


def distance(one: PciDevice, other: PciDevice) -> Distance:
    common = 0
    for ours, theirs in zip(one.path, other.path, strict=False):
        if ours != theirs:
            break
        common += 1
    # The first part is the root, the second one of its ports. A switch shows as further bridges.
    if common > 1:
        return Distance.SWITCH
    if common == 1:
        return Distance.ROOT
    return Distance.NUMA if one.numa == other.numa >= 0 else Distance.MACHINE


def nearest(gpu: PciDevice, devices: Sequence[RdmaDevice]) -> tuple[list[RdmaDevice], Distance]:
    """The devices with an active port that are nearest to the GPU, and how near they are."""
    active = [device for device in devices if device.ports]
    if not active:
        return [], Distance.MACHINE
    best = min(distance(gpu, each.device) for each in active)
    return [each for each in active if distance(gpu, each.device) is best], best


def ports_near(address: str, root: Path = ROOT) -> tuple[str, ...]:
    """The ports of the RDMA devices nearest to the GPU at this PCI address. Empty if they are all equally near, or if the kernel does not
    tell where the GPU is: then there is nothing to choose by."""
    gpu = next((each for each in gpus(root) if each.name == address), None)
    if gpu is None:
        return ()
    devices = rdma_devices(root)
    near, _ = nearest(gpu, devices)
    if len(near) == sum(bool(each.ports) for each in devices):
        return ()
    return tuple(port for each in near for port in each.ports)


def read_text(file: Path) -> str:
    """Returns what a file of the kernel says, "" if it says nothing."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
