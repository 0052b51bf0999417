"""A burst of three times the capacity: how much is served, how much is refused, and how soon latency is as before.

    python -m benchmarks.burst --quick
    python -m benchmarks.burst --vllm DIR --peers FOLDER

Each system runs alone on the machine. It is first asked at several rates: its capacity is the highest rate at which requests meet the service
level. Then comes one load without a pause: most of the capacity, three times the capacity for two minutes, and most of it again. Goodput is
the number of requests per second that met the service level, by the time at which they were sent. Clients wait for a minute, then go away.
Work is lost when its tokens were computed but are in no whole answer. Writes burst.json and burst.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.machine import warn_of_bystanders
from benchmarks.lib.processes import adopt_orphans
from benchmarks.lib.servers import (
    VLLM_PD,
    RunningSystem,
    System,
    add_system_flags,
    asked_systems,
    check_alive,
    model_folder,
    played,
    running,
    text_of,
)
from benchmarks.lib.tables import Floor, at_least, at_most, table_of
from tandem.base.errors import ConfigurationError, TandemError
from tandem.base.flags import adder
from tandem.cluster.saving import results_folder
from tandem.loadgen.api import RequestShape
from tandem.loadgen.load import LoadStream, poisson
from tandem.loadgen.metrics import ServiceLevel, parse_service_level
from tandem.loadgen.timeline import Timeline
from tandem.loadgen.vocabulary import TextVocabulary, load_tokenizer
from tandem.loadgen.workload import Lengths, Session, random_prompts

_WINDOW_S = 10.0  # the length of the windows in which goodput must have recovered
_BACK = 0.95
_LATEST_S = 30.0
_DURING = 0.9
_THROWN = 0.05
_VLLM = re.compile(r"^vllm:(prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)$", re.M)
_QUIET_S = 1.5  # counters can be a second old


class Tokens(msgspec.Struct, frozen=True):
    prompt: float = 0.0
    output: float = 0.0

    def less(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt - other.prompt, self.output - other.output)


class BurstStage(msgspec.Struct, frozen=True):
    name: str
    begin: float
    end: float
    rate: float

    @property
    def count(self) -> int:
        return max(1, round(self.rate * (self.end - self.begin)))


class BurstFigures(msgspec.Struct):
    system: str
    capacity: float  # requests per second
    stages: list[BurstStage]
    requests: int
    goodput: dict[str, float]  # by stage: requests per second within the service level
    during_share: float  # goodput during the burst, as a share of the capacity
    recovered_after_s: float | None  # from the end of the burst; None: not while it was observed
    turned_away: int  # with 503 or 429
    with_retry_after: int
    failed: int  # had no whole answer for another reason, mostly because the client stopped waiting
    failures: dict[str, int]
    computed: Tokens
    answered: Tokens  # that are in whole answers
    thrown_prompt_share: float
    thrown_output_share: float


def floors_of(measured: BurstFigures) -> list[Floor]:
    title = measured.system
    thrown = max(measured.thrown_prompt_share, measured.thrown_output_share)
    back = math.inf if measured.recovered_after_s is None else measured.recovered_after_s
    untold = measured.turned_away - measured.with_retry_after
    return [
        at_least(f"{title}: goodput during the burst, of the capacity", measured.during_share, _DURING),
        at_most(f"{title}: until goodput is 95% of what it was, after the burst", back, _LATEST_S, "s"),
        at_most(f"{title}: computed tokens that are in no whole answer", thrown, _THROWN),
        at_most(f"{title}: turned away and not told when to come back", untold, 0),
    ]


def tokens_computed(system: System) -> Tokens:
    """Returns the tokens that the server has computed since its start, by its own counters."""
    time.sleep(_QUIET_S)
    if system.key.startswith("tandem"):
        nodes = msgspec.json.decode(text_of(system.url, "/cluster"))["nodes"]
        counters = [node.get("counters", {}) for node in nodes]
        prompt = sum(one.get("prompt_tokens_computed", 0) for one in counters)
        # A prefill node's one output token of each answer is also counted as the decode node's first.
        output = sum(node.get("counters", {}).get("output_tokens", 0) for node in nodes if node["role"] != "prefill")
        return Tokens(prompt, output)
    counted = dict.fromkeys(("prompt", "generation"), 0.0)
    for name, value in _VLLM.findall(text_of(system.url, "/metrics")):
        counted[name] += float(value)
    return Tokens(counted["prompt"], counted["generation"])


def attained(asked: Sequence[Timeline], slo: ServiceLevel) -> float:
    return sum(map(slo.is_met_by, asked)) / len(asked) if asked else 0.0


def measure(
    system: str,
    capacity: float,
    stages: Sequence[BurstStage],
    began_at: float,
    asked: Sequence[Timeline],
    computed: Tokens,
    slo: ServiceLevel,
) -> BurstFigures:
    """`began_at`: the load's beginning, on the timelines' clock."""
    by_stage: dict[str, list[Timeline]] = {stage.name: [] for stage in stages}
    for one in asked:
        by_stage[next((s for s in stages if one.sent_at - began_at < s.end), stages[-1]).name].append(one)
    goodput = {
        stage.name: sum(map(slo.is_met_by, by_stage[stage.name])) / (stage.end - stage.begin) for stage in stages
    }
    whole = [one for one in asked if one.succeeded]
    answered = Tokens(float(sum(one.prompt_tokens for one in whole)), float(sum(one.output_tokens for one in whole)))
    failures: dict[str, int] = {}
    told = 0
    for one in asked:
        if one.failure is not None:
            failures[one.failure.kind] = failures.get(one.failure.kind, 0) + 1
            told += one.failure.says_when_to_retry
    turned_away = failures.get("http_503", 0) + failures.get("http_429", 0)
    return BurstFigures(
        system=system,
        capacity=capacity,
        stages=list(stages),
        requests=len(asked),
        goodput=goodput,
        during_share=goodput["burst"] / capacity,
        recovered_after_s=recovery(by_stage["before"], by_stage["after"], began_at, stages[-1], slo),
        turned_away=turned_away,
        with_retry_after=told,
        failed=sum(failures.values()) - turned_away,
        failures=failures,
        computed=computed,
        answered=answered,
        thrown_prompt_share=_share(computed.prompt, answered.prompt),
        thrown_output_share=_share(computed.output, answered.output),
    )


def recovery(
    before: Sequence[Timeline], after: Sequence[Timeline], began_at: float, stage: BurstStage, slo: ServiceLevel
) -> float | None:
    """Returns from when on, in every window of ten seconds, as many requests meet the service level as before, less 5%."""
    wanted = _BACK * attained(before, slo)
    sent = [(one.sent_at - began_at, one) for one in after]
    starts = sorted({at for at, _ in sent if at <= stage.end - _WINDOW_S} | {stage.begin})
    back: float | None = None
    for start in starts:
        window = [one for at, one in sent if start <= at < start + _WINDOW_S]
        if not window or attained(window, slo) < wanted:
            back = None
        elif back is None:
            back = start
    return None if back is None else back - stage.begin


def _share(computed: float, answered: float) -> float:
    return max(0.0, 1 - answered / computed) if computed else 0.0


_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4)  # the rates to try, as shares of what a crowd of users achieves
_CROWD = 6
_TIMES, _SHARE = 3.0, 0.8  # of the capacity: the burst, and the load before and after it
_ANSWER, _PATIENCE_S = 32, 60.0  # tokens, and how long a client waits
_ENOUGH = 0.9  # the share of requests that must meet the service level at a rate that counts as capacity


class BurstDurations(msgspec.Struct, frozen=True):
    """Durations in seconds."""

    trial: float
    before: float
    burst: float
    after: float


_FULL = BurstDurations(trial=20.0, before=40.0, burst=120.0, after=60.0)
_QUICK = BurstDurations(trial=6.0, before=10.0, burst=20.0, after=20.0)


class Bursts(msgspec.Struct):
    settings: dict[str, object]
    measured: list[BurstFigures] = []
    absences: dict[str, str] = {}


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, out="results/burst")
    add_system_flags(parser)
    add = adder(parser)
    add("--quick", None, False, "a burst of 20 s: two minutes a system")
    add("--input", "TOKENS", 512, "(%(default)s)")
    add("--slo", "LIMITS", "ttft=2s,itl=200ms", "(%(default)s)")
    within = "of the time to the first token: as long may a request wait, or it is turned away (%(default)g)"
    add("--within", "X", 0.4, within)
    add("--seed", "N", 0, "(%(default)s)")
    options = parser.parse_args()
    if options.within <= 0:
        parser.error(f"--within must be above 0, not {options.within:g}")
    return options


def main() -> int:
    options, console = _parse(), Console(stderr=True)
    slo = parse_service_level(options.slo)
    lasting = _QUICK if options.quick else _FULL
    model = model_folder(options.model)
    systems = _systems(options, asked_systems(options, model))
    folder = results_folder(options.out)
    vocabulary = TextVocabulary(load_tokenizer(model))
    outcome = Bursts(
        settings={
            "model": model.name,
            "slo": str(slo),
            "lasting": lasting,
            "input": options.input,
            "within": options.within,
            "seed": options.seed,
        }
    )
    adopt_orphans()
    for system in systems:
        warn_of_bystanders(console, system.title)
        try:
            with running(system, folder / system.key) as started:
                console.print(f"{system.title}: ready after {started.ready_s:.1f} s", highlight=False)
                one = Trial(started, options, slo, lasting, vocabulary, console)
                outcome.measured.append(one.run())
                check_alive(started)
        except TandemError as error:
            outcome.absences[system.title] = str(error)
            console.print(f"{system.title}: {error}", style="yellow", markup=False)
    floors = [floor for one in outcome.measured if one.system.startswith("Tandem") for floor in floors_of(one)]
    return report(options, outcome, *shown(outcome), floors=floors, failed=not outcome.measured, width=150)


def _systems(options: argparse.Namespace, systems: list[System]) -> list[System]:
    """Leaves vLLM's 1P+1D out, and has Tandem turn away who would wait too long. The rest of the service level is for computing the prompt
    itself, along with other requests' answers."""
    ttft = parse_service_level(options.slo).ttft
    door = ("--set", f"router.admit_within={ttft * options.within:g}") if ttft is not None else ()
    return [
        replace(system, command=(*system.command, *door)) if system.key.startswith("tandem") else system
        for system in systems
        if system.key != VLLM_PD
    ]


class Trial:
    """One system's trial, from its capacity to what is left after the burst."""

    def __init__(
        self,
        started: RunningSystem,
        options: argparse.Namespace,
        slo: ServiceLevel,
        lasting: BurstDurations,
        vocabulary: TextVocabulary,
        console: Console,
    ) -> None:
        self._system = started.system
        self._options = options
        self._slo = slo
        self._lasting = lasting
        self._vocabulary = vocabulary
        self._console = console
        self._rng = np.random.default_rng(options.seed)
        self._shape = RequestShape(started.model, temperature=0.0, timeout_s=_PATIENCE_S)

    def run(self) -> BurstFigures:
        capacity = self._capacity()
        lasting = self._lasting
        at = (0.0, lasting.before, lasting.before + lasting.burst)
        stages = [
            BurstStage("before", at[0], at[1], capacity * _SHARE),
            BurstStage("burst", at[1], at[2], capacity * _TIMES),
            BurstStage("after", at[2], at[2] + lasting.after, capacity * _SHARE),
        ]
        before = tokens_computed(self._system)
        arrivals = [stage.begin + time for stage in stages for time in self._times(stage.count, stage.rate)]
        load = self._play(len(arrivals), arrivals=arrivals)
        computed = tokens_computed(self._system).less(before)
        return measure(self._system.title, capacity, stages, load.began_at, load.timelines, computed, self._slo)

    def _capacity(self) -> float:
        """Returns the capacity. Raises ConfigurationError if no rate that was tried meets the service level."""
        crowd = self._play(_CROWD * 4, users=_CROWD).timelines
        whole = [one for one in crowd if one.succeeded]
        if not whole:
            raise ConfigurationError(f"{self._system.title} answers nothing: {crowd[0].failure}")
        span = max(one.ended_at for one in crowd) - min(one.sent_at for one in crowd)
        most = len(whole) / span
        for share in _SHARES:
            rate = most * share
            count = max(4, round(rate * self._lasting.trial))
            met = attained(self._play(count, arrivals=self._times(count, rate)).timelines, self._slo)
            self._console.print(
                f"{self._system.title}: at {rate:.2f} requests/s {met:.0%} meet {self._slo}",
                style="dim",
                highlight=False,
            )
            if met >= _ENOUGH:
                return rate
        raise ConfigurationError(
            f"{self._system.title} meets {self._slo} at none of the rates from {most * _SHARES[-1]:.2f} requests/s on: "
            "name a wider one with --slo"
        )

    def _play(self, count: int, *, arrivals: list[float] | None = None, users: int | None = None) -> LoadStream:
        prompts = self._prompts(count)
        return asyncio.run(played(self._system.url, self._shape, prompts, arrivals=arrivals, users=users))

    def _prompts(self, count: int) -> list[Session]:
        lengths = Lengths(self._options.input, _ANSWER)
        return random_prompts(self._vocabulary, self._rng, count, lengths)

    def _times(self, count: int, rate: float) -> list[float]:
        return poisson(self._rng, count, rate)


_COLUMNS = {
    "system": "{system}",
    "capacity /s": "{capacity:.2f}",
    "goodput before": "{goodput[before]:.2f}",
    "during": "{goodput[burst]:.2f}",
    "after": "{goodput[after]:.2f}",
    "during, of capacity": "{during_share:.0%}",
    "recovered after s": "{recovered_after_s:.0f}",
    "turned away": "{turned_away}",
    "with Retry-After": "{with_retry_after}",
    "otherwise failed": "{failed}",
    "prompt tokens thrown away": "{thrown_prompt_share:.1%}",
    "output tokens": "{thrown_output_share:.1%}",
}


def shown(outcome: Bursts) -> Iterator[Table | str]:
    yield table_of("Three times the capacity, and what came of it", outcome.measured, _COLUMNS)
    for title, why in outcome.absences.items():
        yield f"{title}: {why}"


if __name__ == "__main__":
    run(main)
