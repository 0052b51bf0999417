"""Shows a run: its progress, its summary, its plot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tandem.loadgen.load import LoadStream
from tandem.loadgen.metrics import Distribution, Summary
from tandem.loadgen.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLUMNS = Distribution.__struct_fields__


def render(summary: Summary) -> RenderableType:
    table = Table(title=summary.label, title_justify="left")
    table.add_column("ms")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, distribution in (
        ("time to first token", summary.ttft_ms),
        ("time per output token", summary.tpot_ms),
        ("inter-token latency", summary.itl_ms),
        ("end to end", summary.e2e_ms),
    ):
        cells = [f"{getattr(distribution, column):.2f}" if distribution else "–" for column in _COLUMNS]
        table.add_row(name, *cells)
    return Group(table, *(Text(line) for line in lines_of(summary)))


def lines_of(summary: Summary) -> list[str]:
    lines = [
        f"{summary.succeeded} requests in {summary.duration_s:.2f} s: {summary.requests_per_s:.2f} requests/s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.input_tokens_per_s:.1f} input tokens/s"
    ]
    if summary.goodput_per_s is not None and summary.attainment is not None:
        lines.append(
            f"goodput {summary.goodput_per_s:.2f} requests/s: {summary.attainment:.1%} of the requests had {summary.slo}"
        )
    if summary.short_answers:
        lines.append(f"{summary.short_answers} answers ended before the tokens asked for")
    for failure in summary.failures:
        lines.append(f"{failure.count} failed, {failure.kind}: {failure.example}")
    return lines


def print_summary(console: Console, summary: Summary) -> None:
    console.print(render(summary))


_REFRESH_S = 0.5
_PLAIN_LINE_S = 5.0  # for output in which a line cannot be redrawn, such as a log file


async def with_progress(run: Awaitable[None], loads: Sequence[LoadStream], console: Console, title: str) -> None:
    """Shows the loads' progress until `run` ends."""
    shown = asyncio.create_task(_redraw(loads, console, title) if console.is_terminal else _log(loads, console, title))
    try:
        await run
    finally:
        shown.cancel()
        await asyncio.gather(shown, return_exceptions=True)


async def _redraw(loads: Sequence[LoadStream], console: Console, title: str) -> None:
    columns = (TextColumn(title), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(title, total=sum(load.total for load in loads), state="")
        try:
            while True:
                progress.update(task, completed=sum(len(load.timelines) for load in loads), state=state_of(loads))
                progress.refresh()
                await asyncio.sleep(_REFRESH_S)
        finally:
            progress.update(task, completed=sum(len(load.timelines) for load in loads), state=state_of(loads))


async def _log(loads: Sequence[LoadStream], console: Console, title: str) -> None:
    while True:
        await asyncio.sleep(_PLAIN_LINE_S)
        console.print(f"{title}: {state_of(loads)}", highlight=False)


def state_of(loads: Sequence[LoadStream]) -> str:
    ended = sum(len(load.timelines) for load in loads)
    total = sum(load.total for load in loads)
    failed = sum(not timeline.succeeded for load in loads for timeline in load.timelines)
    running = sum(len(load.active) for load in loads)
    chunks = sum(
        len(timeline.chunk_times) for load in loads for group in (load.timelines, load.active) for timeline in group
    )
    elapsed = max((load.duration_s for load in loads), default=0.0)
    rate = chunks / elapsed if elapsed > 0 else 0.0
    failures = f" · {failed} failed" if failed else ""
    return f"{ended}/{total} requests · {running} running · {rate:.0f} tokens/s{failures}"


def plot_run(figure: Figure, timelines: Sequence[Timeline], began_at: float, title: str) -> None:
    served = [timeline for timeline in timelines if timeline.succeeded]
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    distribution(axes[0][0], "time to first token", {"": [timeline.ttft for timeline in served]})
    gaps = [gap for timeline in served for gap in timeline.inter_token]
    distribution(axes[0][1], "inter-token latency", {"": gaps})
    distribution(axes[1][0], "end to end", {"": [timeline.e2e for timeline in served]})
    _throughput(axes[1][1], served, began_at)


def distribution(axes: Axes, title: str, series: Mapping[str, Sequence[float]]) -> None:
    """Plots the share of values up to x. The tail matters most, so x is logarithmic and p99 is marked."""
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.02)
    axes.axhline(0.99, color="grey", linewidth=0.5, linestyle=":")
    for name, seconds in series.items():
        # Two chunks that arrive together have latency 0, which has no logarithm.
        values = np.maximum(np.sort(np.asarray(seconds)) * 1e3, 1e-2)
        if len(values):
            axes.plot(values, np.arange(1, len(values) + 1) / len(values), label=name, drawstyle="steps-post")
    axes.set_xscale("log")
    axes.grid(alpha=0.3)


def _throughput(axes: Axes, served: Sequence[Timeline], began_at: float) -> None:
    axes.set_title("output over time")
    axes.set_xlabel("s")
    axes.set_ylabel("chunks/s")
    times = np.asarray([moment - began_at for timeline in served for moment in timeline.chunk_times])
    if len(times):
        edges = np.linspace(0.0, float(times.max()), num=min(120, max(2, int(times.max()) + 1)))
        counts, _ = np.histogram(times, bins=edges)
        axes.step(edges[:-1], counts / np.diff(edges), where="post")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
