"""Where a process listens."""

from __future__ import annotations

import os
import socket


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
