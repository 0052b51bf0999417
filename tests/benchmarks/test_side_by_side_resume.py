"""An interrupted experiment resumes, and never mixes with another one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks.lib.servers import System
from benchmarks.side_by_side import experiment as module
from benchmarks.side_by_side.experiment import Experiment
from benchmarks.side_by_side.loads import QUICK, Examination, MeasuredLoad, cells_of
from benchmarks.side_by_side.outcome import Absence, ComparisonOutcome, Start
from benchmarks.side_by_side.resume import KeptResults, keep, resume
from tandem.base.errors import ConfigurationError, Unavailable
from tandem.loadgen.metrics import parse_service_level
from tandem.loadgen.report import MachineDescription
from tandem.loadgen.timeline import Timeline
from tandem.loadgen.vocabulary import GuessedVocabulary

SYSTEMS = [System(key, key.title(), ("true",), 1) for key in ("ours", "theirs")]


def outcome(**fields: Any) -> ComparisonOutcome:
    given: dict[str, Any] = {
        "made_at": "", "machine": MachineDescription("p", 2, "Linux", "3.11"), "command": "python", "titles": {"ours": "Ours"},
        "settings": {"plan": QUICK, "seed": 0, "runs": 1}, "cells": cells_of(QUICK),
    }  # fmt: skip
    return ComparisonOutcome(**(given | fields))


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    before = outcome(
        starts=[Start("ours", 0, 1.0, 2.0, 0.0)], absences=[Absence("ours", 1, "x"), Absence("gone", 0, "y")]
    )
    keep(tmp_path, KeptResults(before, {"1 user": {"ours": [0.5, 0.25]}}))
    fresh = outcome(
        titles={"ours": "Ours", "theirs": "Theirs"}, settings={"plan": QUICK, "seed": 0, "runs": 3}
    )
    found = resume(tmp_path, fresh)
    assert found.outcome.starts == before.starts
    assert found.outcome.titles == fresh.titles
    assert found.outcome.settings["runs"] == 3
    assert found.outcome.absences == [Absence("gone", 0, "y")], "who is there now is tried again"
    assert found.gaps == {"1 user": {"ours": [0.5, 0.25]}}
    assert not list(tmp_path.glob("*.new"))


def test_an_empty_folder_begins_anew(tmp_path: Path) -> None:
    fresh = outcome()
    assert resume(tmp_path, fresh) == KeptResults(fresh, {})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (outcome(settings={"plan": QUICK, "seed": 1, "runs": 1}), "another seed"),
        (outcome(settings={"seed": 0, "runs": 1}), "another plan"),
        (outcome(machine=MachineDescription("q", 2, "Linux", "3.11")), "another machine"),
    ],
)
def test_another_experiments_figures_are_neither_mixed_nor_overwritten(
    tmp_path: Path, other: ComparisonOutcome, said: str
) -> None:
    keep(tmp_path, KeptResults(other, {}))
    before = (tmp_path / "outcome.json").read_bytes()
    with pytest.raises(ConfigurationError, match=said):
        resume(tmp_path, outcome())
    assert (tmp_path / "outcome.json").read_bytes() == before
    (tmp_path / "outcome.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be gone on with"):
        resume(tmp_path, outcome())


class World:
    """Systems that answer at once, except those that a test breaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.broken: set[str] = set()
        self.dies: set[str] = set()
        monkeypatch.setattr(module, "running", self.running)
        monkeypatch.setattr(module, "Examiner", self.examiner)
        monkeypatch.setattr(module, "check_alive", self.check_alive)
        monkeypatch.setattr(module, "warn_of_bystanders", lambda console, title: 0.0)

    @contextmanager
    def running(self, system: System, folder: Path) -> Iterator[Any]:
        self.started.append(system.key)
        if system.key in self.broken:
            raise Unavailable("it does not start")
        yield SimpleNamespace(system=system, model="m", ready_s=1.0)

    def examiner(self, *args: object) -> Any:
        timeline = Timeline("x", max_tokens=2, prompt_tokens=8, chunk_times=[1.0, 1.5])
        return SimpleNamespace(examine=lambda: Examination(0.5, [MeasuredLoad("1 user", [timeline], 2.0)]))

    def check_alive(self, started: Any) -> None:
        if started.system.key in self.dies:
            raise Unavailable("it died")


def run(kept: KeptResults, runs: int, tmp_path: Path) -> None:
    slo = parse_service_level("ttft=1s")
    console = Console(file=io.StringIO())
    made = Experiment(SYSTEMS, QUICK, GuessedVocabulary(), slo, kept.outcome, kept.gaps, tmp_path, console)
    made.run(runs, 0, lambda: keep(tmp_path, kept))


def test_only_what_is_missing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch)
    world.broken, world.dies = {"theirs"}, set()
    run(resume(tmp_path, outcome()), 1, tmp_path)
    assert world.started == ["ours", "theirs"]

    world.started.clear()
    world.broken, world.dies = set(), {"theirs"}
    again = resume(tmp_path, outcome(titles={"ours": "Ours", "theirs": "Theirs"}))
    run(again, 2, tmp_path)
    assert world.started == ["theirs", "ours", "theirs"]
    assert not any(one.system == "theirs" for one in again.outcome.examined), (
        "what a dying server did is no figure"
    )
    assert again.gaps == {"1 user": {"ours": [0.5, 0.5]}}

    world.started.clear()
    world.dies = set()
    last = resume(tmp_path, outcome(titles={"ours": "Ours", "theirs": "Theirs"}))
    run(last, 2, tmp_path)
    assert world.started == ["theirs", "theirs"]
    assert {(one.system, one.run) for one in last.outcome.starts} == {
        (k, r) for k in ("ours", "theirs") for r in (0, 1)
    }
    assert last.outcome.absences == []
    assert (
        msgspec.json.decode((tmp_path / "outcome.json").read_bytes(), type=ComparisonOutcome).examined
        == last.outcome.examined
    )
