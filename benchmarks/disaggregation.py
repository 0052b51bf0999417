"""What disaggregation gains: Tandem and vLLM on one machine, each disaggregated and aggregated.

    python -m benchmarks.disaggregation --quick
    python -m benchmarks.disaggregation --vllm DIR --peers FOLDER

DIR is a virtual environment with vLLM. FOLDER has the scripts that start vLLM: docs/performance.md says what they run.

Every system runs alone with all of the machine's cores; systems are started, measured and stopped in turn. Loads: a closed loop of 1, 4 and 8
users with prompts of 512 tokens and answers of 64; chats, alone and while prompts of 2,048 tokens arrive; prompts that share their first 1,000
tokens. Writes disaggregation.json and disaggregation.txt, and each system's output.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from rich.console import Console

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.machine import warn_of_bystanders
from benchmarks.lib.processes import adopt_orphans
from benchmarks.lib.servers import (
    TANDEM_PD,
    System,
    add_system_flags,
    asked_systems,
    check_alive,
    model_folder,
    running,
)
from benchmarks.side_by_side.loads import FULL, QUICK, Examiner, LoadPlan, LoadQuestions, cells_of
from benchmarks.side_by_side.outcome import (
    Absence,
    ComparisonOutcome,
    ExaminedSystem,
    Handovers,
    Start,
    headlines,
    judge,
    shown,
)
from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.base.flags import adder
from tandem.cluster.saving import results_folder
from tandem.cluster.trace.account import handover
from tandem.cluster.trace.command import TraceClient
from tandem.loadgen.api import Prompt
from tandem.loadgen.metrics import ServiceLevel, parse_service_level, summarize
from tandem.loadgen.vocabulary import TextVocabulary, Vocabulary, load_tokenizer

_A_REQUEST_S = 60.0
_ANSWER = 16


class Experiment(msgspec.Struct, frozen=True):
    """Adds what it finds to `outcome`."""

    plan: LoadPlan
    vocabulary: Vocabulary
    slo: ServiceLevel
    outcome: ComparisonOutcome
    folder: Path
    console: Console

    def run(self, systems: Sequence[System], runs: int, seed: int) -> None:
        for number in range(runs):
            questions = LoadQuestions.draw(self.plan, self.vocabulary, seed + number)
            for system in systems:
                try:
                    self._examine(system, number, questions)
                except TandemError as error:
                    self.outcome.absences.append(Absence(system.key, number, str(error)))
                    self.console.print(f"{system.title}: {error}", style="yellow", markup=False)

    def _examine(self, system: System, number: int, questions: LoadQuestions) -> None:
        outcome, title = self.outcome, f"run {number + 1}, {system.title}"
        bystanders = warn_of_bystanders(self.console, title)
        self.console.print(f"{title}: starting", highlight=False)
        with running(system, self.folder / f"{system.key}-{number + 1}") as started:
            self.console.print(f"{title}: ready after {started.ready_s:.1f} s", highlight=False)
            examiner = Examiner(system.url, started.model, self.plan, questions, self.console, title)
            first_ttft_s, loads = examiner.examine()
            check_alive(started)
            if system.key == TANDEM_PD:
                prompts = [session.turns[0].prompt for session in questions.handed_over]
                took = measure_handovers(system.url, started.model, prompts)
                outcome.handovers.append(Handovers(system.key, number, took))
            first_answer_s = started.ready_s + first_ttft_s
            outcome.starts.append(Start(system.key, number, started.ready_s, first_answer_s, bystanders))
            for load in loads:
                summary = summarize(load.label, load.timelines, load.duration_s, self.slo)
                outcome.examined.append(ExaminedSystem(system.key, number, load.label, summary))


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


def main() -> int:
    parser = parser_of(__doc__, out="results/disaggregation")
    add_system_flags(parser)
    parser.add_argument("--runs", type=int, metavar="N", help="(3; 1 with --quick)")
    add = adder(parser)
    add("--quick", None, False, "fewer requests: minutes, not an hour")
    add("--slo", "LIMITS", "ttft=1s,itl=100ms", "of the goodput (%(default)s)")
    add("--seed", "N", 0, "(%(default)s)")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    runs = options.runs if options.runs is not None else (1 if options.quick else 3)
    if runs < 1:
        raise ConfigurationError(f"--runs must be at least 1, not {runs}")
    slo = parse_service_level(options.slo)
    model = model_folder(options.model)
    systems = asked_systems(options, model)
    outcome = ComparisonOutcome(
        settings={"model": model.name, "runs": runs, "seed": options.seed, "slo": str(slo), "plan": plan},
        titles={system.key: system.title for system in systems},
        cells=cells_of(plan),
    )
    adopt_orphans()
    vocabulary, console = TextVocabulary(load_tokenizer(model)), Console(stderr=True)
    experiment = Experiment(plan, vocabulary, slo, outcome, results_folder(options.out), console)
    experiment.run(systems, runs, options.seed)
    floors = headlines(outcome) + judge(outcome)
    return report(options, outcome, *shown(outcome), floors=floors, failed=not outcome.examined, width=160)


if __name__ == "__main__":
    run(main)
