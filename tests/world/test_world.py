"""A few schedules of the world. `make search` runs as many as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.world import control
from tests.world.diagram import Diagram
from tests.world.mutants import hunt, mutant
from tests.world.schedule import Outcome, run
from tests.world.search import Sums
from tests.world.seeds import FOUND, FOUND_IN_CONTROL
from tests.world.shrink import promise, shrink
from tests.world.stranger import STRANGER, comes_in

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", [*FOUND, *range(9)])
def test_every_schedule_keeps_every_promise(seed: int) -> None:
    outcome = run(seed)
    assert not outcome.violations, "\n".join(outcome.history)


@pytest.mark.parametrize("seed", [*FOUND_IN_CONTROL, *range(9)])
def test_every_schedule_of_the_control_plane_keeps_every_promise(seed: int) -> None:
    outcome = control.run(seed)
    assert not outcome.violations, "\n".join(outcome.history)


def test_a_seed_of_the_control_plane_gives_the_same_history() -> None:
    first, _, second = (control.run(seed) for seed in (8, 5, 8))
    assert len(first.history) > 10
    assert second.history == first.history


def test_a_seed_gives_the_same_history() -> None:
    """Twice in one process, after another one, and in a process of its own: every frame, at its time."""
    first, _, second = (run(seed) for seed in (8, 5, 8))
    assert first.frames > 500
    assert first.faults > 1
    assert second.digest == first.digest
    assert second.history == first.history
    alone = subprocess.run(
        [sys.executable, "-m", "tests.world.search", "--seeds", "8", "--worlds", "cluster", "--history"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    *history, digest, _ = alone.stdout.splitlines()
    assert history == first.history
    assert digest == f"{first.frames} frames, all together {first.digest}"


def test_what_a_stranger_sends_has_no_effect() -> None:
    """Every frame of the cluster's processes is the same without it."""
    seed = next(seed for seed in range(100) if comes_in(seed))
    forged, alone = run(seed), run(seed, without={STRANGER})
    assert forged.forged > 0
    assert alone.forged == 0
    assert (alone.digest, alone.frames) == (forged.digest, forged.frames)


@pytest.mark.parametrize("bug", ["freed-before-it-is-read", "freed-under-a-store", "freed-under-a-load"])
def test_a_bug_is_found(bug: str) -> None:
    """Blocks that are given back before the consumer, or a copy to or from a tier, is done with them."""
    assert hunt(bug, 40) is not None


def test_a_search_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "build" / "kept.json"
    sums = Sums.kept_in(file, 40)
    for seed in (41, 40, 43):  # of several processes, as they come
        sums.add(Outcome(seed, requests=2))
    sums.keep_in(file)
    again = Sums.kept_in(file, 0)
    assert again.next == 42
    assert again.schedules == 3
    assert again.counts["requests"] == 6


def test_a_broken_schedule_is_made_small() -> None:
    assert shrink(list("abcdefgh"), lambda without: not {"c", "g"} & set(without)) == set("abdefh")


def test_a_broken_schedule_of_the_control_plane_is_drawn_without_what_it_does_not_need() -> None:
    diagram = Diagram()
    with mutant("half-a-rollout"):
        first = control.run(0)
        without = {part for part in first.parts if part[0] in "fc" or part in ("o2", "o3")}
        outcome = control.run(0, without=without, on_message=diagram.on_message)
    assert promise(outcome) == promise(first) == "control plane: a rollout is over, and # did not take part"
    assert outcome.faults == 0
    drawn = diagram.drawn(outcome)
    assert "─ apply both 137 ─" in drawn
    assert "rollout over" in drawn
    assert sum("── order" in line for line in drawn.splitlines()) == 1
