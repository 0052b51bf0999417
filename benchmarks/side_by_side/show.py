"""Shows an outcome as one table and one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.lib.tables import floors_table
from benchmarks.side_by_side.loads import ALONE, BESIDE
from benchmarks.side_by_side.outcome import (
    ComparisonOutcome,
    Figure,
    Reading,
    figure,
    first_answer_after,
    goodput,
    itl_p50,
    itl_p99,
    output_rate,
    tpot,
    ttft,
)
from tandem.cluster.saving import new_figure
from tandem.loadgen.show import distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

_COLUMNS: tuple[tuple[str, Reading], ...] = (
    ("TTFT p50 ms", ttft),
    ("TPOT p50 ms", tpot),
    ("ITL p50 ms", itl_p50),
    ("ITL p99 ms", itl_p99),
    ("output tokens/s", output_rate),
    ("goodput/s", goodput),
)


def print_outcome(console: Console, outcome: ComparisonOutcome) -> None:
    console.print(_figures(outcome))
    console.print(f"goodput: requests with {outcome.settings['slo']}", highlight=False)
    for system, title in outcome.titles.items():
        first = first_answer_after(outcome, system)
        if first is not None:
            console.print(f"{title}: first token {_cell(first)} s after the command", highlight=False)
    for absence in outcome.absences:
        title = outcome.titles[absence.system]
        console.print(
            f"{title}, run {absence.run + 1}: not examined: {absence.why}", style="yellow", markup=False
        )
    console.print(floors_table(outcome.floors))


def _figures(outcome: ComparisonOutcome) -> Table:
    runs = 1 + max((examined.run for examined in outcome.examined), default=0)
    table = Table(
        title=f"Medians of {runs} runs (least to greatest)" if runs > 1 else "One run", title_justify="left"
    )
    table.add_column("load")
    table.add_column("system")
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("failed", justify="right")
    for cell in outcome.cells:
        for system, title in outcome.titles.items():
            summaries = [e.summary for e in outcome.examined if (e.system, e.cell) == (system, cell)]
            if summaries:
                failed = sum(summary.failed for summary in summaries)
                figures = [_cell(figure(outcome, system, cell, reading)) for _, reading in _COLUMNS]
                table.add_row(cell, title, *figures, str(failed) if failed else "")
        table.add_section()
    return table


def _cell(value: Figure | None) -> str:
    if value is None:
        return "–"
    if value.low == value.high:
        return number(value.median)
    return f"{number(value.median)} ({number(value.low)}–{number(value.high)})"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def draw_outcome(outcome: ComparisonOutcome, gaps: dict[str, dict[str, list[float]]]) -> Picture:
    """`gaps` has every inter-token latency of every run in seconds, by cell and system."""
    picture = new_figure(14, 9)
    picture.suptitle(f"{outcome.machine.processor}, {outcome.machine.cores} cores, {outcome.made_at}")
    axes = picture.subplots(2, 3)
    axes[1][2].sharex(axes[1][1])
    loops = [cell for cell in outcome.cells if cell.endswith(("user", "users"))]
    _bars(axes[0][0], outcome, loops, "time to first token, p50, ms", ttft)
    _bars(axes[0][1], outcome, loops, "output tokens/s", output_rate)
    _bars(axes[0][2], outcome, loops, "inter-token latency, p99, ms", itl_p99)
    _bars(axes[1][0], outcome, [ALONE, BESIDE], "chats' inter-token latency, p99, ms", itl_p99)
    for axis, cell in ((axes[1][1], ALONE), (axes[1][2], BESIDE)):
        series = {outcome.titles[system]: values for system, values in gaps.get(cell, {}).items()}
        distribution(axis, f"inter-token latency, {cell}", series)
    axes[0][0].legend()
    return picture


def _bars(axes: Axes, outcome: ComparisonOutcome, cells: list[str], title: str, reading: Reading) -> None:
    """Bars are medians, whiskers the runs' smallest and largest values. Latencies differ by orders of magnitude, so their axis is logarithmic and
    begins at a millisecond; rates begin at zero."""
    axes.set_title(title)
    width = 0.8 / max(1, len(outcome.titles))
    for index, (system, name) in enumerate(outcome.titles.items()):
        found = [
            (at, value) for at, cell in enumerate(cells) if (value := figure(outcome, system, cell, reading))
        ]
        places = [at + (index - (len(outcome.titles) - 1) / 2) * width for at, _ in found]
        heights = [value.median for _, value in found]
        spread = [
            [value.median - value.low for _, value in found],
            [value.high - value.median for _, value in found],
        ]
        bars = axes.bar(places, heights, width, yerr=spread, label=name, capsize=2)
        axes.bar_label(bars, labels=[number(height) for height in heights], fontsize=7)
    axes.set_xticks(range(len(cells)), cells)
    if reading is output_rate:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.set_ylim(bottom=1)
    axes.grid(axis="y", alpha=0.3)
