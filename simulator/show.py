"""Shows a simulation's progress and its report in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tandem.simulator.outcome import NodeLoad, SimulationReport
from tandem.simulator.simulation import OnProgress

# More nodes than these are shown as the least, the median and the most loaded of each role.
MOST_ROWS = 12


@contextmanager
def progress(console: Console, what: str) -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as shown:
        row = shown.add_task(what, total=1.0, now="")

        def on_progress(share: float, seconds: float, running: int) -> None:
            shown.update(row, completed=share, now=f"{seconds:.0f} s simulated, {running} under way")

        yield on_progress


def render(report: SimulationReport, wall_s: float) -> RenderableType:
    times = Table(title="simulated", title_justify="left")
    times.add_column("ms")
    for name in ("p50", "p90", "p99", "max"):
        times.add_column(name, justify="right")
    for name, distribution in (
        ("time to first token", report.ttft_ms),
        ("inter-token latency", report.itl_ms),
        ("time per output token", report.tpot_ms),
        ("end to end", report.e2e_ms),
    ):
        cells = [
            f"{getattr(distribution, column):.1f}" if distribution else "–" for column in ("p50", "p90", "p99", "max")
        ]
        times.add_row(name, *cells)
    nodes = Table(title_justify="left")
    for name in ("node", "busy", "requests", "prompt tokens read", "found cached", "written", "most blocks"):
        nodes.add_column(name, justify="left" if name == "node" else "right")
    for load in _shown(report.nodes):
        nodes.add_row(
            load.node_id,
            f"{load.busy:.0%}",
            str(load.requests),
            str(load.prompt_tokens_computed),
            str(load.prompt_tokens_cached),
            str(load.output_tokens),
            f"{load.most_blocks:.0%}",
        )
    return Group(times, nodes, *(Text(line) for line in lines_of(report, wall_s)))


def lines_of(report: SimulationReport, wall_s: float) -> list[str]:
    lines = [
        f"{report.served} of {report.requests} requests served in {report.seconds:.0f} s: "
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens / max(report.seconds, 1e-9):.0f} output tokens/s",
        f"{report.hit_rate:.0%} of the prompts' tokens were found in a cache; {report.bytes_moved / 1e9:.2f} GB of KV were handed over",
    ]
    if report.attainment is not None and report.goodput_per_s is not None:
        lines.append(
            f"goodput {report.goodput_per_s:.2f} requests/s: {report.attainment:.1%} of the requests had {report.slo}"
        )
    for what, counts in (("refused by the router", report.refusals), ("failed", report.failures)):
        lines += [f"{count} {what}: {code}" for code, count in sorted(counts.items())]
    if report.changes:
        lines.append(
            f"the pools changed their size {len(report.changes)} times, a machine its role {report.role_changes} times:"
        )
        lines += [f"  {change.at:7.0f} s  {change.why}" for change in report.changes]
    lines.append(f"simulated in {wall_s:.1f} s")
    return lines


def _shown(loads: Sequence[NodeLoad]) -> list[NodeLoad]:
    if len(loads) <= MOST_ROWS:
        return list(loads)
    shown = []
    for role in sorted({load.role for load in loads}):
        ordered = sorted((load for load in loads if load.role == role), key=lambda load: load.busy)
        places = sorted({0, len(ordered) // 2, len(ordered) - 1})
        shown += [ordered[place] for place in places]
    return shown
