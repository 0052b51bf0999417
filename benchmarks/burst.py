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
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.bursting import (
    BurstFigures,
    BurstStage,
    attained,
    floors_of,
    measure,
    tokens_computed,
)
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.loads import played
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
    running,
)
from benchmarks.lib.tables import table_of
from tandem.base.errors import ConfigurationError, TandemError
from tandem.cluster.saving import results_folder
from tandem.loadgen.api import RequestShape
from tandem.loadgen.load import LoadStream, poisson
from tandem.loadgen.metrics import ServiceLevel, parse_service_level
from tandem.loadgen.vocabulary import TextVocabulary, load_tokenizer
from tandem.loadgen.workload import Lengths, Session, random_prompts

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
    parser.add_argument("--quick", action="store_true", help="a burst of 20 s: two minutes a system")
    parser.add_argument("--input", type=int, default=512, metavar="TOKENS", help="(%(default)s)")
    parser.add_argument("--slo", default="ttft=2s,itl=200ms", metavar="LIMITS", help="(%(default)s)")
    parser.add_argument(
        "--within",
        type=float,
        default=0.4,
        metavar="X",
        help="of the time to the first token: as long may a request wait, or it is turned away (%(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
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
        },
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
    floors = [
        floor for one in outcome.measured if one.system.startswith("Tandem") for floor in floors_of(one)
    ]
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
        return measure(
            self._system.title, capacity, stages, load.began_at, load.timelines, computed, self._slo
        )

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

    def _play(
        self, count: int, *, arrivals: list[float] | None = None, users: int | None = None
    ) -> LoadStream:
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
