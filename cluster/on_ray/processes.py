"""The processes of a cluster on their machines, and signals to them. For `tandem chaos`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.on_ray.errors import answer, translated
from tandem.wire.errors import DeadlineExceeded, NodeLost, Unavailable

_ASK_S = 10.0
_HIT_S = 60.0  # a process has to start on that machine first


class Process(msgspec.Struct, frozen=True):
    """One actor's process. `started` tells it from a later one with the same number."""

    name: str  # the actor's
    pid: int
    started: int  # clock ticks since the machine's boot
    machine: str  # as Ray names it


async def find_process(name: str, namespace: str) -> Process:
    """Raises Unavailable when there is none, NodeLost or DeadlineExceeded when it does not say who it is."""
    try:
        actor = await asyncio.to_thread(ray.get_actor, name, namespace)
        told = await asyncio.wait_for(answer(actor.__ray_call__.remote(who_am_i)), _ASK_S)
    except ValueError as error:
        raise Unavailable(f"{name} does not run") from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} did not say within {_ASK_S:.0f} s which process it is") from error
    except RayError as error:
        raise translated(error) from error
    pid, started, machine = told
    return Process(name, pid, started, machine)


async def send_signal(process: Process, number: signal.Signals, wake_after_s: float | None = None) -> None:
    """To the process on its machine. With `wake_after_s` it is continued after that, also when this command is gone by
    then."""
    task = ray.remote(num_cpus=0, max_retries=0)(hit)
    placed = task.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=process.machine, soft=False)
    )
    ref = await asyncio.to_thread(placed.remote, process.pid, process.started, int(number), wake_after_s)
    try:
        if not await asyncio.wait_for(answer(ref), _HIT_S):
            raise NodeLost(f"{process.name} had ended before the signal came")
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"no process on {process.name}'s machine sent the signal within {_HIT_S:.0f} s"
        ) from error


def who_am_i(actor: object) -> tuple[int, int, str]:
    """Runs in the actor's process."""
    return os.getpid(), started_at(os.getpid()), ray.get_runtime_context().get_node_id()


def hit(pid: int, started: int, number: int, wake_after_s: float | None) -> bool:
    """Runs on the process's machine. False when the process is not there any more."""
    try:
        if started_at(pid) != started:
            return False
        if wake_after_s is not None:
            # Before the signal, and detached: a stopped process must not depend on the one that stopped it.
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
    """Field 22 of /proc/PID/stat; the process's name before it may hold spaces."""
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
