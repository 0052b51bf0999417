"""Medians over the runs, their spread, their floors, and one table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec
from rich.table import Table
from rich.text import Text

from benchmarks.lib.servers import TANDEM_AGGREGATED, TANDEM_PD, VLLM_AGGREGATED, VLLM_PD
from benchmarks.lib.tables import Floor, at_least, at_most, seen, table_of
from benchmarks.side_by_side.loads import ALONE, BESIDE, closed_loop
from tandem.loadgen.metrics import Summary

_FIRST_ANSWER_S = 25.0
_HANDOVER_MS = 10.0


class Start(msgspec.Struct, frozen=True):
    system: str
    run: int
    ready_s: float  # from the command until the server reports that it is healthy
    first_answer_s: float  # from the command to the first token of its first answer
    bystanders: float  # how many cores other processes used just before


class ExaminedSystem(msgspec.Struct, frozen=True):
    """One system under one load in one run."""

    system: str
    run: int
    cell: str
    summary: Summary


class Handovers(msgspec.Struct, frozen=True):
    """For prompts that were sent alone: milliseconds from the last forward pass of prefill to the first one that decodes."""

    system: str
    run: int
    ms: list[float]


class Absence(msgspec.Struct, frozen=True):
    """A system that could not be measured in a run."""

    system: str
    run: int
    why: str


class Figure(msgspec.Struct, frozen=True):
    """A median, and the smallest and largest value of the runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure | None:
        return cls(median(values), min(values), max(values)) if values else None


class ComparisonOutcome(msgspec.Struct):
    """Everything that one experiment found."""

    settings: dict[str, object]
    titles: dict[str, str]  # of the systems, by key
    cells: list[str]
    starts: list[Start] = []
    examined: list[ExaminedSystem] = []
    handovers: list[Handovers] = []
    absences: list[Absence] = []


Reading = Callable[[Summary], float | None]


def ttft(summary: Summary) -> float | None:
    return summary.ttft_ms.p50 if summary.ttft_ms else None


def tpot(summary: Summary) -> float | None:
    return summary.tpot_ms.p50 if summary.tpot_ms else None


def itl_p99(summary: Summary) -> float | None:
    return summary.itl_ms.p99 if summary.itl_ms else None


def output_rate(summary: Summary) -> float:
    return summary.output_tokens_per_s


_COLUMNS: dict[str, Reading] = {
    "TTFT p50 ms": ttft,
    "TPOT p50 ms": tpot,
    "ITL p50 ms": lambda summary: summary.itl_ms.p50 if summary.itl_ms else None,
    "ITL p99 ms": itl_p99,
    "output tokens/s": output_rate,
    "goodput/s": lambda summary: summary.goodput_per_s,
}


def figure(outcome: ComparisonOutcome, system: str, cell: str, reading: Reading) -> Figure | None:
    values = [reading(e.summary) for e in outcome.examined if (e.system, e.cell) == (system, cell)]
    return Figure.of([value for value in values if value is not None])


def first_answer_after(outcome: ComparisonOutcome, system: str) -> Figure | None:
    return Figure.of([start.first_answer_s for start in outcome.starts if start.system == system])


def headlines(outcome: ComparisonOutcome) -> list[Floor]:
    """The main figures that need no other system."""
    found = []
    for system, title in outcome.titles.items():
        for cell, name, reading, unit in (
            (closed_loop(1), ": TTFT p50", ttft, "ms"),
            (closed_loop(1), ": TPOT p50", tpot, "ms"),
            (closed_loop(8), "", output_rate, "tokens/s"),
        ):
            if value := figure(outcome, system, cell, reading):
                found.append(seen(f"{title}, {cell}{name}", value.median, unit))
    return found


def judge(outcome: ComparisonOutcome) -> list[Floor]:
    one, eight = closed_loop(1), closed_loop(8)
    separate, together = (TANDEM_PD, VLLM_PD), (TANDEM_AGGREGATED, VLLM_AGGREGATED)
    return [
        _times_better(outcome, "time to first token", separate, one, ttft, 4.0),
        _times_better(outcome, "output tokens/s", separate, eight, output_rate, 5.0),
        _times_better(outcome, "p99 inter-token latency", separate, eight, itl_p99, 8.0),
        _times_better(outcome, "time to first token", together, one, ttft, 1.0),
        _times_better(outcome, "time per output token", together, one, tpot, 1.3),
        _times_better(outcome, "output tokens/s", together, eight, output_rate, 1.3),
        _steadiness(outcome),
        _handover(outcome),
        _promptness(outcome),
    ]


def _times_better(
    outcome: ComparisonOutcome, what: str, systems: tuple[str, str], cell: str, reading: Reading, floor: float
) -> Floor:
    """Returns the ratio of two medians; for latencies inverted, so that more is always better."""
    mine, other = (_median(figure(outcome, system, cell, reading)) for system in systems)
    layout = "1P+1D" if systems[0] == TANDEM_PD else "aggregated"
    ratio = None
    if mine and other:
        ratio = mine / other if reading is output_rate else other / mine
    return at_least(f"{layout} beside vLLM's: {what}, {cell}", ratio, floor, "×")


def _steadiness(outcome: ComparisonOutcome) -> Floor:
    """The claim of disaggregation itself, which needs no other system."""
    alone, beside = (_median(figure(outcome, TANDEM_PD, cell, itl_p99)) for cell in (ALONE, BESIDE))
    ratio = beside / alone if beside is not None and alone else None
    return at_most("1P+1D: chats' p99 inter-token latency beside long prompts, over alone", ratio, 2, "×")


def _handover(outcome: ComparisonOutcome) -> Floor:
    """Judges the median over the runs of each run's median."""
    found = Figure.of([median(one.ms) for one in outcome.handovers if one.system == TANDEM_PD])
    claim = "1P+1D: handover of a prompt, last forward pass there to first forward pass here"
    return at_most(claim, _median(found), _HANDOVER_MS, "ms")


def _promptness(outcome: ComparisonOutcome) -> Floor:
    found = _median(first_answer_after(outcome, TANDEM_PD))
    return at_most("1P+1D: from the command to the first token", found, _FIRST_ANSWER_S, "s")


def _median(found: Figure | None) -> float | None:
    return None if found is None else found.median


def shown(outcome: ComparisonOutcome) -> Iterator[Table | Text]:
    yield _table(outcome)
    yield Text(f"goodput: requests with {outcome.settings['slo']}")
    for system, title in outcome.titles.items():
        first = first_answer_after(outcome, system)
        if first is not None:
            yield Text(f"{title}: first token {_cell(first)} s after the command")
    for absence in outcome.absences:
        title = outcome.titles[absence.system]
        yield Text(f"{title}, run {absence.run + 1}: not examined: {absence.why}", "yellow")


def _table(outcome: ComparisonOutcome) -> Table:
    runs = 1 + max((examined.run for examined in outcome.examined), default=0)
    title = f"Medians of {runs} runs (least to greatest)" if runs > 1 else "One run"
    rows = []
    for cell in outcome.cells:
        for system, name in outcome.titles.items():
            summaries = [e.summary for e in outcome.examined if (e.system, e.cell) == (system, cell)]
            if summaries:
                figures = {head: _cell(figure(outcome, system, cell, reading)) for head, reading in _COLUMNS.items()}
                failed = sum(summary.failed for summary in summaries)
                rows.append({"load": cell, "system": name, **figures, "failed": failed or ""})
    return table_of(title, rows, left=2)


def _cell(value: Figure | None) -> str:
    if value is None:
        return "–"
    if value.low == value.high:
        return _number(value.median)
    return f"{_number(value.median)} ({_number(value.low)}–{_number(value.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
