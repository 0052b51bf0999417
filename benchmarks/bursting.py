"""Counts for `benchmarks.burst`: every request with its end, the tokens that a server computed, and how many of them were of use."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

import msgspec

from benchmarks.lib.servers import System, text_of
from benchmarks.lib.tables import Floor, at_least, at_most
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.timeline import Timeline

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
        output = sum(
            node.get("counters", {}).get("output_tokens", 0) for node in nodes if node["role"] != "prefill"
        )
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
        stage.name: sum(map(slo.is_met_by, by_stage[stage.name])) / (stage.end - stage.begin)
        for stage in stages
    }
    whole = [one for one in asked if one.succeeded]
    answered = Tokens(
        float(sum(one.prompt_tokens for one in whole)), float(sum(one.output_tokens for one in whole))
    )
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
    before: Sequence[Timeline],
    after: Sequence[Timeline],
    began_at: float,
    stage: BurstStage,
    slo: ServiceLevel,
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
