"""Checks how a GPU's memory leaves its machine, and its pod: whether RDMA devices read it, which of them is beside it, and whether the
processes of another pod reach it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tandem.cluster.doctor.machine_checks import Check, Finding, has_gpu, ok, warn
from tandem.machine.pci import Distance, PciDevice, RdmaDevice, gpus, nearest, rdma_devices, read_text

_OPEN_SINCE = 515  # the driver whose open kernel modules export dma-buf
_DMABUF_SINCE = (5, 12)  # Linux
# The kernel numbers its first namespaces so: a process there is in no container's.
_FIRST_IPC, _FIRST_PID = "ipc:[4026531839]", "pid:[4026531836]"
_HOW_NEAR = {
    Distance.SWITCH: "on its PCI switch",
    Distance.ROOT: "on its PCI root",
    Distance.NUMA: "on its NUMA node",
    Distance.MACHINE: "on another processor",
}


def gpu_checks(root: Path = Path("/")) -> dict[str, Check]:
    if not has_gpu(root / "dev"):
        return {}
    checks: dict[str, Check] = {"pods": lambda: check_pods(root)}
    if rdma_devices(root):
        checks |= {"gpudirect": lambda: check_gpu_direct(root), "nearest": lambda: check_nearest(root)}
    return checks


# --- GPUDirect


def check_gpu_direct(root: Path) -> Finding:
    """Whether RDMA devices read and write GPU memory by themselves."""
    driver, is_open = _driver(root)
    if any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")):
        return ok(f"nvidia-peermem is loaded (driver {driver or 'unknown'}): RDMA devices read GPUs' memory themselves")
    kernel = read_text(root / "proc/sys/kernel/osrelease")
    missing = []
    if not is_open:
        missing.append(f"the driver's kernel modules ({driver or 'unknown'}) are not the open ones")
    elif _major(driver) < _OPEN_SINCE:
        missing.append(f"the driver is {driver}, and {_OPEN_SINCE} is needed")
    if _version(kernel) < _DMABUF_SINCE:
        missing.append(f"Linux is {kernel or 'unknown'}, and {'.'.join(map(str, _DMABUF_SINCE))} is needed")
    if not missing:
        return ok(f"dma-buf (open kernel modules {driver}, Linux {kernel}): RDMA devices read GPUs' memory themselves")
    return warn(
        f"RDMA devices cannot read GPUs' memory: nvidia-peermem is not loaded, and for dma-buf {' and '.join(missing)}",
        "modprobe nvidia-peermem on the machine itself (the driver brings it, the GPU operator loads it with driver.rdma.enabled), or "
        "install the driver's open kernel modules; until then KV on GPUs passes through host memory",
    )


def _driver(root: Path) -> tuple[str, bool]:
    """Returns the driver's version, and whether its kernel modules are the open ones: `NVRM version: NVIDIA UNIX Open Kernel Module for
    x86_64  580.65.06  Release Build ...`."""
    first = read_text(root / "proc/driver/nvidia/version").partition("\n")[0]
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", first)
    return (found[1] if found else read_text(root / "sys/module/nvidia/version")), "Open Kernel Module" in first


def _major(version: str) -> int:
    return int(version.partition(".")[0]) if version[:1].isdigit() else 0


def _version(release: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else ()


# --- which device is beside which GPU


def check_nearest(root: Path) -> Finding:
    """Names the RDMA devices that the node on each GPU uses."""
    cards, devices = gpus(root), rdma_devices(root)
    if not cards:
        return ok("the kernel does not say where the GPUs are: UCX chooses RDMA devices")
    if not any(device.ports for device in devices):
        return ok("no RDMA port is active; see the finding on rdma")
    found = [nearest(card, devices) for card in cards]
    what = "; ".join(_said(*each) for each in zip(cards, found, strict=True))
    far = [card.name for card, (_, how) in zip(cards, found, strict=True) if how is Distance.MACHINE]
    if far and len({device.device.numa for device in devices} | {card.numa for card in cards}) > 1:
        return warn(
            what,
            f"put prefill and decode nodes on other GPUs than {', '.join(far)}, or an RDMA device beside these: what they send crosses "
            "between processors",
        )
    return ok(what)


def _said(card: PciDevice, found: tuple[Sequence[RdmaDevice], Distance]) -> str:
    near, how = found
    return f"{card.name} → {', '.join(port for device in near for port in device.ports)} ({_HOW_NEAR[how]})"


# --- pods


def check_pods(root: Path) -> Finding:
    """CUDA's IPC, by which one process opens another's GPU memory, works within one IPC and one PID namespace."""
    ipc, pid = (_link(root / "proc/self/ns" / name) for name in ("ipc", "pid"))
    if (ipc, pid) == (_FIRST_IPC, _FIRST_PID):
        return ok("in the machine's own IPC and PID namespaces: its processes open each other's GPU memory (cuda_ipc)")
    return ok(
        "in a container: its processes open each other's GPU memory (cuda_ipc); those of other containers here are reached over the network "
        "alone, unless they share this one's IPC and PID namespaces. Put all nodes of a machine into one pod"
    )


def _link(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:
        return ""
