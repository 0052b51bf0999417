"""A soak as a table."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.soaking.verdict import SoakVerdict

_MIB = 2**20


def print_soaked(console: Console, soaked: SoakVerdict) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(soaked.by_kind.items()))
    console.print(
        f"{soaked.minutes:.1f} minutes: {soaked.answered} answers ({soaked.tokens} tokens), "
        f"{soaked.aborted} gone away from, {sum(soaked.failures.values())} failed; "
        f"{soaked.checked} answers were known, {len(soaked.wrong)} of them wrong",
        highlight=False,
    )
    console.print(kinds, style="dim", highlight=False)
    if soaked.kills:
        times = [kill.whole_after_s for kill in soaked.kills]
        console.print(
            f"{len(soaked.kills)} nodes killed; whole again after {median(times):.1f} s (median), "
            f"{max(times):.1f} s at most",
            highlight=False,
        )
    console.print(_growths(soaked))
    for fault in soaked.faults:
        console.print(f"✗ {fault}", style="red", markup=False, highlight=False)
    if not soaked.faults:
        console.print(
            "✓ nothing failed, nothing was wrong, nothing grew, every block came back", style="green"
        )


def _growths(soaked: SoakVerdict) -> Table:
    table = Table(title="After the first third: the middle, and what was gained", title_justify="left")
    table.add_column("process")
    for name in ("minutes", "memory MiB", "gained", "descriptors", "gained", "threads", "gained"):
        table.add_column(name, justify="right")
    for growth in sorted(soaked.growths, key=lambda growth: growth.process):
        table.add_row(
            growth.process,
            f"{growth.seconds / 60:.1f}",
            f"{growth.memory / _MIB:.0f}",
            f"{growth.memory_grew / _MIB:+.1f}",
            f"{growth.descriptors:.0f}",
            f"{growth.descriptors_grew:+.1f}",
            f"{growth.threads:.0f}",
            f"{growth.threads_grew:+.1f}",
        )
    return table
