"""An experiment goes through every system in every run, and a system that fails loses its own figures alone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks.lib.servers import System
from benchmarks.side_by_side import experiment as module
from benchmarks.side_by_side.experiment import Experiment
from benchmarks.side_by_side.loads import QUICK, Examination, MeasuredLoad, cells_of
from benchmarks.side_by_side.outcome import Absence, ComparisonOutcome
from tandem.base.errors import Unavailable
from tandem.loadgen.metrics import parse_service_level
from tandem.loadgen.timeline import Timeline
from tandem.loadgen.vocabulary import GuessedVocabulary

KEYS = ("ours", "broken", "dying")


def test_who_does_not_start_or_dies_has_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[str] = []

    @contextmanager
    def running(system: System, folder: Path) -> Iterator[Any]:
        started.append(system.key)
        if system.key == "broken":
            raise Unavailable("it does not start")
        yield SimpleNamespace(system=system, model="m", ready_s=1.0)

    def examiner(*args: object) -> Any:
        timeline = Timeline("x", max_tokens=2, prompt_tokens=8, chunk_times=[1.0, 1.5])
        return SimpleNamespace(examine=lambda: Examination(0.5, [MeasuredLoad("1 user", [timeline], 2.0)]))

    def check_alive(one: Any) -> None:
        if one.system.key == "dying":
            raise Unavailable("it died")

    monkeypatch.setattr(module, "running", running)
    monkeypatch.setattr(module, "Examiner", examiner)
    monkeypatch.setattr(module, "check_alive", check_alive)
    monkeypatch.setattr(module, "warn_of_bystanders", lambda console, title: 0.0)
    outcome = ComparisonOutcome({"plan": QUICK}, {key: key.title() for key in KEYS}, cells_of(QUICK))
    slo, console = parse_service_level("ttft=1s"), Console(file=io.StringIO())
    made = Experiment(QUICK, GuessedVocabulary(), slo, outcome, tmp_path, console)
    made.run([System(key, key.title(), ("true",), 1) for key in KEYS], runs=2, seed=0)
    assert started == [*KEYS, *KEYS]
    assert [(one.system, one.run) for one in outcome.examined] == [("ours", 0), ("ours", 1)]
    assert [(one.system, one.first_answer_s) for one in outcome.starts] == [("ours", 1.5), ("ours", 1.5)]
    expected = [
        Absence(key, run, why)
        for run in (0, 1)
        for key, why in (("broken", "it does not start"), ("dying", "it died"))
    ]
    assert outcome.absences == expected
