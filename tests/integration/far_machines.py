"""The keepers of a node's ranks on other machines, each as a process on this machine: `python -m tests.integration.far_machines`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.base.logs import begin_logging
from tandem.node.config import NodeConfig
from tandem.node.ranks.keeper import RankKeeper
from tandem.wire.endpoints import key_of
from tandem.wire.sockets import public_key

ROOT = Path(__file__).parents[2]
RANK = "tandem.node.ranks.process"


class FarMachine:
    """Another machine of a node: its keeper's process, and the ranks that the keeper starts."""

    def __init__(self, config: NodeConfig, number: int = 1, enter: Sequence[str] = ()) -> None:
        """`enter`: the words before a command that run it on this machine, if the machine has its own network."""
        self.process = subprocess.Popen(
            [*enter, sys.executable, "-m", "tests.integration.far_machines", public_key(), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.process.stdin.flush()
        self.endpoint = self.process.stdout.readline().decode().strip()
        assert key_of(self.endpoint)

    @property
    def ranks(self) -> set[int]:
        """The process ids of the ranks."""
        return {pid for pid in children_of(self.process.pid) if RANK in command_of(pid)}

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def is_there(pid: int) -> bool:
    """Whether the process runs. A zombie does not count."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def main() -> None:
    lead, number = sys.argv[1:]
    config = msgspec.json.decode(sys.stdin.readline(), type=NodeConfig)
    begin_logging(config.logs, f"{config.node_id}-machine{number}")
    keeper = RankKeeper(config, int(number))
    print(keeper.open(lead), flush=True)
    while not keeper.hold(3600.0):
        pass
    keeper.stop()


if __name__ == "__main__":
    main()
