"""Every process that a command started is found and ended, however it hides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: adopting orphans is for good.
_IN_A_PROCESS_OF_ITS_OWN = """
import os, sys, time
from pathlib import Path
from benchmarks.lib.processes import Family, adopt_orphans, descendants

adopt_orphans()
family = Family(["bash", "-c", sys.argv[2]], {"MARK": "given"}, Path(sys.argv[1]))
deadline = time.monotonic() + 20
while not (Path(sys.argv[1]) / "ready").exists() or sys.argv[4] not in family.members().values():
    assert time.monotonic() < deadline
    time.sleep(0.01)
print(sorted(family.members().values()))
family.stop(float(sys.argv[3]))
print(descendants(os.getpid()))
"""


def outcome_of(command: str, folder: Path, awaited: str, patience_s: float = 5.0) -> tuple[str, str]:
    """The family's members once it is ready and has the awaited one, and who is left after its end. A forked process has its parent's name
    until it executes a program of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS_OF_ITS_OWN, str(folder), command, str(patience_s), awaited],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    members, left = ended.stdout.splitlines()
    return members, left


def test_a_command_that_stays_is_ended(tmp_path: Path) -> None:
    members, left = outcome_of("touch ready; exec sleep 60", tmp_path, "sleep")
    assert members == "['sleep']"
    assert left == "{}"


def test_a_server_that_outlives_its_command_in_a_session_of_its_own_is_found_and_ended(tmp_path: Path) -> None:
    command = 'setsid bash -c "sleep 61 & echo $MARK > mark; touch ready; wait" > /dev/null 2>&1 &'
    members, left = outcome_of(command, tmp_path, "sleep")
    assert "sleep" in members
    assert left == "{}"
    assert (tmp_path / "mark").read_text() == "given\n"


@pytest.mark.slow
def test_who_does_not_listen_is_ended_by_force(tmp_path: Path) -> None:
    """It is given its time first."""
    command = 'trap "" TERM; touch ready; while true; do sleep 0.05; done'
    _, left = outcome_of(command, tmp_path, "bash", patience_s=0.2)
    assert left == "{}"
