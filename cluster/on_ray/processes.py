"""Finds the processes of a deployment on their machines and signals them. For `tandem chaos`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.base.errors import DeadlineExceeded, NodeLost, Unavailable
from tandem.cluster.on_ray.errors import answer, find_actor

_ASK_S = 10.0
_HIT_S = 60.0  # Ray first has to start a process on that machine


class Process(msgspec.Struct, frozen=True):
    """An actor's process. `started` tells it from a later process with the same pid."""

    name: str  # the actor's
    pid: int
    started: int  # clock ticks since the machine's boot
    machine: str  # the id of its Ray node


async def find_process(name: str, namespace: str) -> Process:
    """Raises Unavailable when no such actor runs, NodeLost or DeadlineExceeded when the actor does not answer."""
    actor = await asyncio.to_thread(find_actor, name, namespace)
    if actor is None:
        raise Unavailable(f"{name} is not running")
    try:
        told = await asyncio.wait_for(answer(actor.__ray_call__.remote(who_am_i)), _ASK_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} did not tell its process id within {_ASK_S:.0f} s") from error
    pid, started, machine = told
    return Process(name, pid, started, machine)


async def send_signal(process: Process, number: signal.Signals, wake_after_s: float | None = None) -> None:
    """Signals the process on its own machine. With `wake_after_s` the machine sends it SIGCONT after that time, even if this
    command has ended by then. Raises NodeLost when the process has ended, DeadlineExceeded when the signal was not sent."""
    task = ray.remote(num_cpus=0, max_retries=0)(hit)
    placed = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=process.machine, soft=False))
    ref = await asyncio.to_thread(placed.remote, process.pid, process.started, int(number), wake_after_s)
    try:
        if not await asyncio.wait_for(answer(ref), _HIT_S):
            raise NodeLost(f"{process.name} had ended before the signal was sent")
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the signal to {process.name} was not sent on its machine within {_HIT_S:.0f} s"
        ) from error


def who_am_i(actor: object) -> tuple[int, int, str]:
    """Runs in the actor's process."""
    return os.getpid(), started_at(os.getpid()), ray.get_runtime_context().get_node_id()


def hit(pid: int, started: int, number: int, wake_after_s: float | None) -> bool:
    """Runs on the process's machine. Returns False when the process has ended."""
    try:
        if started_at(pid) != started:
            return False
        if wake_after_s is not None:
            # Scheduled before the signal and detached, so that the stopped process wakes even if this one dies.
            wake = f"sleep {wake_after_s:.3f}; kill -CONT {pid}"
            subprocess.run(
                ["setsid", "--fork", "sh", "-c", wake],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
            )  # fmt: skip
        os.kill(pid, number)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return True


def started_at(pid: int) -> int:
    """Returns field 22 of /proc/PID/stat. The process's name, an earlier field, may contain spaces."""
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
