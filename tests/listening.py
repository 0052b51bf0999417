"""Finds the addresses where a process listens and the process that listens at an address, and reads from docs/security.md which processes
may listen."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/security.md"


def listening_addresses(pid: int | str = "self") -> set[tuple[str, int]]:
    own = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:
            continue
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with open(f"/proc/{pid}/net/{table}") as rows:
            for row in [line.split() for line in rows.readlines()[1:]]:
                if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                    address, port = row[1].split(":")
                    # The kernel prints each 32 bits as a number of this machine.
                    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                    found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def named_in_the_table() -> set[str]:
    """The processes that docs/security.md names, as beginnings of their command lines."""
    table = PAGE.read_text().partition("## Ports")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def program_of(command: str) -> str:
    program = command.split()[0]
    return program.partition(".")[0] if program.startswith("ray::") else Path(program).name


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
