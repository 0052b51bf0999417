"""Runs every system under every load in turns, so that a slow phase of the machine affects all systems."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.lib.machine import warn_of_bystanders
from benchmarks.lib.servers import System, check_alive, running
from benchmarks.side_by_side.loads import Examiner, LoadPlan, LoadQuestions
from benchmarks.side_by_side.outcome import Absence, ComparisonOutcome, ExaminedSystem, Handovers, Start
from tandem.base.errors import TandemError, Unavailable
from tandem.cluster.trace.account import handover
from tandem.cluster.trace.command import TraceClient
from tandem.loadgen.api import Prompt
from tandem.loadgen.metrics import ServiceLevel, summarize
from tandem.loadgen.vocabulary import Vocabulary

_A_REQUEST_S = 60.0
_ANSWER = 16


class Experiment:
    def __init__(
        self,
        plan: LoadPlan,
        vocabulary: Vocabulary,
        slo: ServiceLevel,
        outcome: ComparisonOutcome,
        folder: Path,
        console: Console,
    ) -> None:
        """Adds what it finds to `outcome`."""
        self.outcome = outcome
        self._plan = plan
        self._vocabulary = vocabulary
        self._slo = slo
        self._folder = folder
        self._console = console

    def run(self, systems: Sequence[System], runs: int, seed: int) -> None:
        for run in range(runs):
            questions = LoadQuestions.draw(self._plan, self._vocabulary, seed + run)
            for system in systems:
                try:
                    self._examine(system, run, questions)
                except TandemError as error:
                    self.outcome.absences.append(Absence(system.key, run, str(error)))
                    self._console.print(f"{system.title}: {error}", style="yellow", markup=False)

    def _examine(self, system: System, run: int, questions: LoadQuestions) -> None:
        title = f"run {run + 1}, {system.title}"
        bystanders = warn_of_bystanders(self._console, title)
        self._console.print(f"{title}: starting", highlight=False)
        with running(system, self._folder / f"{system.key}-{run + 1}") as started:
            self._console.print(f"{title}: ready after {started.ready_s:.1f} s", highlight=False)
            examiner = Examiner(system.url, started.model, self._plan, questions, self._console, title)
            examination = examiner.examine()
            check_alive(started)
            if system.hands_over:
                prompts = [session.turns[0].prompt for session in questions.handed_over]
                took = measure_handovers(system.url, started.model, prompts)
                self.outcome.handovers.append(Handovers(system.key, run, took))
            first_answer_s = started.ready_s + examination.first_ttft_s
            self.outcome.starts.append(Start(system.key, run, started.ready_s, first_answer_s, bystanders))
            for measured in examination.measured:
                summary = summarize(measured.cell, measured.timelines, measured.duration_s, self._slo)
                self.outcome.examined.append(ExaminedSystem(system.key, run, measured.cell, summary))


def measure_handovers(url: str, model: str, prompts: Sequence[Prompt]) -> list[float]:
    """Returns for each prompt, sent alone, the milliseconds from the last forward pass of its prefill to the first one that decodes. Only
    Tandem can tell."""
    client = TraceClient(url, None)
    found: list[float] = []
    try:
        for prompt in prompts:
            name = f"handover-{secrets.token_hex(8)}"
            body = {"model": model, "prompt": prompt, "max_tokens": _ANSWER, "ignore_eos": True}
            headers = {"x-tandem-trace": "1", "x-request-id": name}
            try:
                httpx.post(
                    f"{url}/v1/completions", json=body, headers=headers, timeout=_A_REQUEST_S, trust_env=False
                ).raise_for_status()
            except httpx.HTTPError as error:
                raise Unavailable(f"a traced request is not answered: {error}") from error
            if items := handover(client.find(name)):
                found.append(sum(item.seconds for item in items) * 1e3)
    finally:
        client.close()
    if not found:
        raise Unavailable("no traced request was handed over: a prompt of this length is not sent away")
    return found
