"""Which process of this machine listens at an endpoint."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def listener(endpoint: str) -> int:
    """Returns the process that listens at this endpoint, in any network namespace of this machine."""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    wanted = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{int(port):04X}"
    networks: dict[str, set[str]] = {}  # the sockets that listen there, by network
    for process in Path("/proc").glob("[0-9]*"):
        try:
            network = os.readlink(process / "ns" / "net")
            if network not in networks:
                rows = [row.split() for row in (process / "net" / "tcp").read_text().splitlines()[1:]]
                networks[network] = {f"socket:[{row[9]}]" for row in rows if row[1] == wanted and row[3] == "0A"}
            if any(os.readlink(file) in networks[network] for file in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # the process has ended
    raise LookupError(f"no process listens at {endpoint}")
