"""What a run's timelines add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from tandem.loadgen.percentiles import percentile
from tandem.loadgen.slo import ServiceLevel
from tandem.loadgen.timeline import Timeline


class Distribution(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution | None:
        """None of nothing: a zero would read as a very good result."""
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
    short_answers: int  # ended before the tokens asked for: the run is lighter than it says
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    slo: str | None = None
    goodput_per_s: float | None = None  # requests within the service level
    attainment: float | None = None  # their share of all that were sent


def summarize(
    label: str, timelines: Iterable[Timeline], duration_s: float, slo: ServiceLevel | None = None
) -> Summary:
    timelines = list(timelines)
    served = [timeline for timeline in timelines if timeline.succeeded]
    tpots = [timeline.tpot for timeline in served]
    input_tokens = sum(timeline.prompt_tokens for timeline in served)
    output_tokens = sum(timeline.output_tokens for timeline in served)
    good = sum(slo.is_met_by(timeline) for timeline in served) if slo is not None else 0
    # A run without a single moment in it has no rate.
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
    """Most frequent first."""
    failures = [timeline.failure for timeline in timelines if timeline.failure is not None]
    examples = {failure.kind: str(failure) for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return [FailureCount(kind, count, examples[kind]) for kind, count in counts.most_common()]
