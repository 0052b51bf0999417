"""Computes what a run's timelines add up to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.percentile import percentile
from tandem.loadgen.timeline import Timeline

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")
# A request meets its inter-token limit if this percentile of its own gaps does. One slow gap spoils a short answer, but not a
# long one.
_ITL_PERCENT = 99.0


class ServiceLevel(msgspec.Struct, frozen=True):
    """Limits in seconds. None means no limit."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def is_met_by(self, timeline: Timeline) -> bool:
        if not timeline.succeeded:
            return False
        if self.ttft is not None and timeline.ttft > self.ttft:
            return False
        if self.e2e is not None and timeline.e2e > self.e2e:
            return False
        if self.tpot is not None and (timeline.tpot or 0.0) > self.tpot:
            return False
        if self.itl is not None and len(timeline.chunk_times) > 1:
            return percentile(sorted(timeline.inter_token), _ITL_PERCENT) <= self.itl
        return True

    def __str__(self) -> str:
        limits = {name: getattr(self, name) for name in self.__struct_fields__}
        return ", ".join(f"{name} ≤ {limit * 1e3:g} ms" for name, limit in limits.items() if limit is not None)


def parse_service_level(text: str) -> ServiceLevel:
    """Parses comma-separated `name=limit` pairs. A limit without a unit is in milliseconds. Raises ConfigurationError."""
    limits: dict[str, float] = {}
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        match = _DURATION.fullmatch(value.strip())
        if name not in ServiceLevel.__struct_fields__ or match is None:
            known = ", ".join(ServiceLevel.__struct_fields__)
            raise ConfigurationError(
                f"{pair.strip()!r} must be a limit on one of {known}, such as ttft=200ms or itl=0.05s"
            )
        if name in limits:
            raise ConfigurationError(f"{name} is limited twice: leave one limit out")
        limits[name] = float(match[1]) * (1.0 if match[2] == "s" else 1e-3)
    return ServiceLevel(**limits)


class Distribution(msgspec.Struct, frozen=True):
    """Values in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution | None:
        """Returns None for no values, because a zero would read as a very good result."""
        if not seconds:
            return None
        values = sorted(value * 1e3 for value in seconds)
        p50, p90, p95, p99 = (percentile(values, percent) for percent in (50, 90, 95, 99))
        return cls(mean=fmean(values), p50=p50, p90=p90, p95=p95, p99=p99, max=values[-1])


class FailureCount(msgspec.Struct, frozen=True):
    kind: str
    count: int
    example: str


class Summary(msgspec.Struct, frozen=True):
    label: str
    duration_s: float
    succeeded: int
    failed: int
    failures: list[FailureCount]
    input_tokens: int
    output_tokens: int
    # Answers that ended before `max_tokens`, so that the run was lighter than its settings say
    short_answers: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    slo: str | None = None
    goodput_per_s: float | None = None  # requests per second that met the service level
    attainment: float | None = None  # the share of all requests that met it


def summarize(label: str, timelines: Iterable[Timeline], duration_s: float, slo: ServiceLevel | None = None) -> Summary:
    timelines = list(timelines)
    served = [timeline for timeline in timelines if timeline.succeeded]
    tpots = [timeline.tpot for timeline in served]
    input_tokens = sum(timeline.prompt_tokens for timeline in served)
    output_tokens = sum(timeline.output_tokens for timeline in served)
    good = sum(slo.is_met_by(timeline) for timeline in served) if slo is not None else 0
    # A run without duration has no rate.
    per_second = 1.0 / duration_s if duration_s > 0 else 0.0
    return Summary(
        label=label,
        duration_s=duration_s,
        succeeded=len(served),
        failed=len(timelines) - len(served),
        failures=count_failures(timelines),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        short_answers=sum(timeline.output_tokens < timeline.max_tokens for timeline in served),
        requests_per_s=len(served) * per_second,
        input_tokens_per_s=input_tokens * per_second,
        output_tokens_per_s=output_tokens * per_second,
        ttft_ms=Distribution.of([timeline.ttft for timeline in served]),
        tpot_ms=Distribution.of([tpot for tpot in tpots if tpot is not None]),
        itl_ms=Distribution.of([gap for timeline in served for gap in timeline.inter_token]),
        e2e_ms=Distribution.of([timeline.e2e for timeline in served]),
        slo=str(slo) if slo is not None else None,
        goodput_per_s=good * per_second if slo is not None else None,
        attainment=good / len(timelines) if slo is not None and timelines else None,
    )


def count_failures(timelines: Iterable[Timeline]) -> list[FailureCount]:
    """Returns the kinds of failures, the most frequent first."""
    failures = [timeline.failure for timeline in timelines if timeline.failure is not None]
    examples = {failure.kind: str(failure) for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return [FailureCount(kind, count, examples[kind]) for kind, count in counts.most_common()]
