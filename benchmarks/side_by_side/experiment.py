"""Runs every system under every load in turns, so that a slow phase of the machine affects all systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.lib.machine import warn_of_bystanders
from benchmarks.lib.servers import RunningSystem, System, check_alive, running
from benchmarks.side_by_side.handovers import measure_handovers
from benchmarks.side_by_side.loads import Examiner, LoadPlan, LoadQuestions
from benchmarks.side_by_side.outcome import (
    Absence,
    ComparisonOutcome,
    ExaminedSystem,
    Gaps,
    Handovers,
    Start,
    judge,
)
from tandem.base.errors import TandemError
from tandem.loadgen.metrics import ServiceLevel, summarize
from tandem.loadgen.vocabulary import Vocabulary


class Experiment:
    def __init__(
        self,
        systems: Sequence[System],
        plan: LoadPlan,
        vocabulary: Vocabulary,
        slo: ServiceLevel,
        outcome: ComparisonOutcome,
        gaps: Gaps,
        folder: Path,
        console: Console,
    ) -> None:
        """`outcome` and `gaps` hold what is known already, and are extended."""
        self.outcome = outcome
        self.gaps = gaps
        self._systems = systems
        self._plan = plan
        self._vocabulary = vocabulary
        self._slo = slo
        self._folder = folder
        self._console = console

    def run(self, runs: int, seed: int, keep: Callable[[], None]) -> None:
        """Calls `keep` after every system."""
        for run in range(runs):
            questions = LoadQuestions.draw(self._plan, self._vocabulary, seed + run)
            for system in self._systems:
                if self.outcome.has(system.key, run):
                    title = f"run {run + 1}, {system.title}"
                    self._console.print(f"{title}: done before", style="dim", highlight=False)
                    continue
                try:
                    self._examine(system, run, questions)
                except TandemError as error:
                    self.outcome.absences.append(Absence(system.key, run, str(error)))
                    self._console.print(f"{system.title}: {error}", style="yellow", markup=False)
                self.outcome.floors = judge(self.outcome)
                keep()

    def _examine(self, system: System, run: int, questions: LoadQuestions) -> None:
        title = f"run {run + 1}, {system.title}"
        bystanders = warn_of_bystanders(self._console, title)
        self._console.print(f"{title}: starting", highlight=False)
        with running(system, self._folder / f"{system.key}-{run + 1}") as started:
            self._console.print(f"{title}: ready after {started.ready_s:.1f} s", highlight=False)
            examiner = Examiner(system.url, started.model, self._plan, questions, self._console, title)
            examination = examiner.examine()
            check_alive(started)
            handovers = self._handovers(started, run, questions) if system.hands_over else []
            first_answer_s = started.ready_s + examination.first_ttft_s
            self.outcome.starts.append(Start(system.key, run, started.ready_s, first_answer_s, bystanders))
            self.outcome.handovers += handovers
            for measured in examination.measured:
                summary = summarize(measured.cell, measured.timelines, measured.duration_s, self._slo)
                self.outcome.examined.append(ExaminedSystem(system.key, run, measured.cell, summary))
                gaps = self.gaps.setdefault(measured.cell, {}).setdefault(system.key, [])
                gaps += [gap for t in measured.timelines if t.succeeded for gap in t.inter_token]

    def _handovers(self, started: RunningSystem, run: int, questions: LoadQuestions) -> list[Handovers]:
        system = started.system
        prompts = [session.turns[0].prompt for session in questions.handed_over]
        picture = self._folder / f"{system.key}-{run + 1}" / "trace.png"
        return [Handovers(system.key, run, measure_handovers(system.url, started.model, prompts, picture))]
