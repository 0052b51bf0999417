"""Everything that was measured, and what of it must not be."""

from __future__ import annotations

import msgspec

from benchmarks.soaking.killing import Kill
from benchmarks.soaking.questions import AnswerTally
from benchmarks.soaking.watching import Bounds, Growth
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
    left_over: str = ""  # what was not given back at the end; "" when all was
    faults: list[str] = []


def judge(soaked: SoakVerdict, bounds: Bounds | None = None) -> list[str]:
    """Each a sentence; none when all is well."""
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
    """The fields of a verdict that a tally has."""
    return {name: getattr(tally, name) for name in SoakVerdict.__struct_fields__ if hasattr(tally, name)}
