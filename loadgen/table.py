"""A run's summary in the terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.loadgen.metrics import Distribution, Summary

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
        f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.input_tokens_per_s:.1f} input tokens/s",
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
