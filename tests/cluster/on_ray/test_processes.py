"""Signals to real processes: a stopped process is woken, and no other process gets a signal."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.on_ray.runtime import import_ray
from tests.waiting import until

import_ray()  # its environment is set first, or other tests of this run could not set it

from tandem.cluster.on_ray.processes import hit, started_at  # noqa: E402


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def state_of(process: subprocess.Popen[bytes]) -> str:
    return (Path("/proc") / str(process.pid) / "stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_process_wakes_by_itself(sleeper: subprocess.Popen[bytes]) -> None:
    assert hit(sleeper.pid, started_at(sleeper.pid), signal.SIGSTOP, 0.2)
    until(lambda: state_of(sleeper) == "T")
    until(lambda: state_of(sleeper) == "S")


def test_a_killed_process_ends_and_another_one_with_its_number_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    started = started_at(sleeper.pid)
    assert not hit(sleeper.pid, started - 1, signal.SIGKILL, None)
    assert sleeper.poll() is None
    assert hit(sleeper.pid, started, signal.SIGKILL, None)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not hit(sleeper.pid, started, signal.SIGKILL, None), "it is gone"
