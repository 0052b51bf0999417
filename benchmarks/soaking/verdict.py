"""Everything that a soak measured, as a table, and what of it is a fault."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import msgspec
from rich.table import Table

from benchmarks.lib.tables import table_of
from benchmarks.soaking.cluster import Bounds, Growth, Kill
from benchmarks.soaking.requests import AnswerTally

OURS = ("ray::PrefillActor", "ray::DecodeActor", "ray::RouterActor", "ray::ControllerActor", "tandem")


class SoakVerdict(msgspec.Struct):
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
_COLUMNS = {
    "process": "{process}",
    "minutes": "{minutes:.1f}",
    "memory MiB": "{memory:.0f}",
    "gained": "{memory_grew:+.1f}",
    "descriptors": "{descriptors:.0f}",
    "gained ": "{descriptors_grew:+.1f}",
    "threads": "{threads:.0f}",
    "gained  ": "{threads_grew:+.1f}",
}


def shown(soaked: SoakVerdict) -> Iterator[Table | str]:
    yield (
        f"{soaked.minutes:.1f} minutes: {soaked.answered} answers ({soaked.tokens} tokens), "
        f"{soaked.aborted} gone away from, {sum(soaked.failures.values())} failed; "
        f"{soaked.checked} answers were known, {len(soaked.wrong)} of them wrong"
    )
    yield ", ".join(f"{count} {kind}" for kind, count in sorted(soaked.by_kind.items()))
    if soaked.kills:
        times = [kill.whole_after_s for kill in soaked.kills]
        after = f"whole again after {median(times):.1f} s (median), {max(times):.1f} s at most"
        yield f"{len(soaked.kills)} nodes killed; {after}"
    rows = [
        msgspec.structs.asdict(growth)
        | {
            "minutes": growth.seconds / 60,
            "memory": growth.memory / _MIB,
            "memory_grew": growth.memory_grew / _MIB,
        }
        for growth in sorted(soaked.growths, key=lambda growth: growth.process)
    ]
    yield table_of("After the first third: the middle, and what was gained", rows, _COLUMNS)
    for fault in soaked.faults:
        yield f"✗ {fault}"
    if not soaked.faults:
        yield "✓ nothing failed, nothing was wrong, nothing grew, every block came back"
