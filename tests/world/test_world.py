"""A few schedules of the world, in a process of their own: the order of sets, and with it a seed's history, depends on how it is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    """Twice in one process, after another one, and in a process of its own: every frame, at its time."""
    together = searched("--seeds", "8", "34", "8", "--history").stdout.splitlines()[:-1]
    alone = searched("--seeds", "8", "--history").stdout.splitlines()[:-1]
    assert "frames, all together" in alone[-1]
    assert together[: len(alone)] == alone
    assert together[-len(alone) :] == alone


def test_a_bug_is_found() -> None:
    """Blocks that are given back before the consumer has read them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.world.mutants", "freed-before-it-is-read", "--most", "40"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
