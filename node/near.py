"""Where a node's GPU is in its machine, and which RDMA devices are nearest to it."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

from tandem.machine.pci import ROOT, ports_near

log = logging.getLogger(__name__)

_DRIVER = "libcuda.so.1"
_ROOM = 32


def near_device(device: str, root: Path = ROOT) -> tuple[str, ...]:
    """Returns the ports of the RDMA devices that a node with this torch device should use; empty: all."""
    address = pci_address(device)
    near = ports_near(address, root) if address else ()
    if near:
        log.info("KV on the GPU at %s goes through %s, which is nearest to it", address, ", ".join(near))
    return near


def pci_address(device: str) -> str:
    """Returns a CUDA device's PCI address as sysfs writes it; "" for another device, or if the driver does not say. CUDA numbers the
    devices that this process may see, so no other numbers help."""
    if not device.startswith("cuda"):
        return ""
    try:
        driver = _load()
    except OSError as error:
        log.warning("where %s is in this machine is not known: %s", device, error)
        return ""
    text, card = ctypes.create_string_buffer(_ROOM), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(card), int(device.partition(":")[2] or 0))
        or driver.cuDeviceGetPCIBusId(text, _ROOM, card)
    )
    if failed:
        log.warning("where %s is in this machine is not known: CUDA's driver ended with %d", device, failed)
        return ""
    domain, _, rest = text.value.decode().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _load() -> Any:
    return ctypes.CDLL(_DRIVER)
