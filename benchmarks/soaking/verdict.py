"""Everything that a soak measured, as a table, and what of it is a fault."""

from __future__ import annotations

from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.soaking.cluster import Bounds, Growth, Kill
from benchmarks.soaking.requests import AnswerTally
from tandem.loadgen.report import MachineDescription

OURS = ("ray::PrefillActor", "ray::DecodeActor", "ray::RouterActor", "ray::ControllerActor", "tandem")


class SoakVerdict(msgspec.Struct):
    made_at: str
    machine: MachineDescription
    command: str
    minutes: float
    answered: int
    aborted: int
    tokens: int
    by_kind: dict[str, int]
    failures: dict[str, int]
    examples: dict[str, str]
    checked: int
    wrong: list[str]
    kills: list[Kill]
    growths: list[Growth]
    left_over: str = ""  # what was not given back at the end; "" if nothing
    faults: list[str] = []


def judge(soaked: SoakVerdict, bounds: Bounds | None = None) -> list[str]:
    """Returns the faults, one sentence each; [] if all is well."""
    bounds = bounds or Bounds()
    faults = []
    if not soaked.answered:
        faults.append("nothing was answered")
    for kind, count in sorted(soaked.failures.items()):
        faults.append(f"{count} requests failed, {kind}: {soaked.examples.get(kind, '')}")
    if soaked.answered and not soaked.checked:
        faults.append("no answer was one that is known")
    if soaked.wrong:
        faults.append(f"{len(soaked.wrong)} wrong answers, the first: {soaked.wrong[0]}")
    if soaked.left_over:
        faults.append(soaked.left_over)
    for growth in soaked.growths:
        if growth.process.startswith(OURS):
            faults += [f"grew while it served: {what}" for what in bounds.broken(growth)]
    return faults


def tallied(tally: AnswerTally) -> dict[str, object]:
    """Returns the fields of a verdict that come from a tally."""
    return {name: getattr(tally, name) for name in SoakVerdict.__struct_fields__ if hasattr(tally, name)}


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
