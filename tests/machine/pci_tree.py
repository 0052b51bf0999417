"""Writes PCI devices as the kernel shows them: folders of their buses, and links to them."""

from __future__ import annotations

from pathlib import Path


def gpu(root: Path, path: str, numa: int = -1) -> None:
    """`path` is the PCI address of each bridge from the root on, then the device's own, such as `pci0000:15/0000:15:01.0/0000:17:00.0`."""
    folder = _device(root, path, numa)
    _write(folder / "vendor", "0x10de")
    _write(folder / "class", "0x030200")
    link = root / "sys/bus/pci/devices" / folder.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


def rdma(root: Path, name: str, path: str, numa: int = -1, state: str = "4: ACTIVE", *, may_open: bool = True) -> None:
    folder = _device(root, path, numa)
    inner = folder / "infiniband" / name
    _write(inner / "ports/1/state", state)
    (inner / "device").symlink_to(folder)
    _write(folder / f"infiniband_verbs/uverbs_{name}/ibdev", name)
    if may_open:
        _write(root / f"dev/infiniband/uverbs_{name}", "")
    link = root / "sys/class/infiniband" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(inner)


def two_sockets(root: Path) -> None:
    """Two processors, each with two switches that hold a GPU and an RDMA device; the first also has an RDMA device on a port of its own."""
    for socket, bus in enumerate(("15", "97")):
        for port in (1, 2):
            switch = f"pci0000:{bus}/0000:{bus}:0{port}.0/0000:{bus}:0{port}.1/0000:{bus}:0{port}.2"
            gpu(root, f"{switch}/0000:{bus}:0{port}.3/0000:{bus}:{port}8.0", socket)
            name = f"mlx5_{2 * socket + port - 1}"
            rdma(root, name, f"{switch}/0000:{bus}:0{port}.4/0000:{bus}:{port}a.0", socket)
    rdma(root, "mlx5_9", "pci0000:15/0000:15:08.0/0000:1f:00.0", 0)


def _device(root: Path, path: str, numa: int) -> Path:
    folder = root / "sys/devices" / path
    _write(folder / "numa_node", str(numa))
    return folder


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")
