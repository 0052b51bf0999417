"""A few schedules of the world, in a process of their own: the order of sets, and with it a seed's history, depends on how it is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def searched(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.world.search", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_schedule_keeps_every_promise() -> None:
    done = searched("--most", "12", "--minutes", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broke a promise" in done.stdout


def test_a_seed_gives_the_same_history() -> None:
    first, second = (searched("--seeds", "7", "--history").stdout.splitlines()[:-1] for _ in range(2))
    assert len(first) > 20
    assert first == second


@pytest.mark.parametrize("bug", ["freed-before-it-is-read", "freed-under-a-store", "freed-under-a-load"])
def test_a_bug_is_found(bug: str) -> None:
    """Blocks that are given back before the consumer, or a copy to or from a tier, is done with them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.world.mutants", bug, "--most", "40"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
