"""Chooses the network devices on which UCX listens. By default UCX takes every device, and its listeners cannot tell
a peer from a stranger. So only the interface with the node's own address is allowed, and RDMA devices: through those
a stranger cannot come in without being told how.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

DEVICES = "UCX_NET_DEVICES"
_SIOCGIFCONF = 0x8912
_ROOM = 64 << 10
_RECORD = struct.Struct("16s2s2s4s16x")  # struct ifreq: the interface's name, then a sockaddr_in


def addresses() -> dict[str, str]:
    """Returns the interface of each address of this machine."""
    return {**_ipv4(), **_ipv6()}


def _ipv4() -> dict[str, str]:
    buffer = array.array("B", bytes(_ROOM))
    where, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, struct.pack("iP", _ROOM, where))
    filled, _ = struct.unpack("iP", answer)
    found = {}
    for name, _, _, address in _RECORD.iter_unpack(buffer.tobytes()[:filled]):
        found[socket.inet_ntoa(address)] = name.rstrip(b"\0").decode().partition(":")[0]
    return found


def _ipv6() -> dict[str, str]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return {}
    rows = [line.split() for line in table.read_text().splitlines()]
    return {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[5] for row in rows}


def devices_for(host: str, near: Sequence[str] = ()) -> str | None:
    """Returns UCX_NET_DEVICES for a node at this address; None for all devices, if no interface has the address or
    there are no others. `near`: the ports of the only RDMA devices to use; empty: of all."""
    where = addresses()
    if (own := where.get(host)) is None:
        return None
    if ipaddress.ip_address(host).is_loopback:
        return own
    if near:
        return ",".join((own, *near))
    others = sorted({name for _, name in socket.if_nameindex()} - {own})
    return "^" + ",".join(others) if others else None


_setting = threading.Lock()  # the environment belongs to the whole process


@contextlib.contextmanager
def listening_at(host: str, near: Sequence[str] = ()) -> Iterator[None]:
    """UCX reads its settings when a backend is made: make it within this context. A value that the operator has set
    stays."""
    with _setting:
        if DEVICES in os.environ:
            yield
            return
        devices = devices_for(host, near)
        if devices is None:
            if host not in addresses():
                logger.warning(
                    "no interface has this node's address %s: UCX listens on every interface unless %s names one",
                    host,
                    DEVICES,
                )
            yield
            return
        os.environ[DEVICES] = devices
        try:
            yield
        finally:
            del os.environ[DEVICES]
