"""Everything that was observed, what of it is a fault, and what follows if there was none."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.cluster.chaos.conductor import BlowReport
from tandem.cluster.chaos.probes import Traffic, longest_gap


class ChaosReport(msgspec.Struct):
    made_at: str
    command: str
    model: str
    seed: int
    minutes: float
    blows: list[BlowReport]
    traffic: Traffic
    blocks_back_after_s: float | None  # None: not all blocks became free, or traffic went on
    left_behind: list[str]
    failure: str = ""  # why a blow could not be dealt
    faults: list[str] = []
    bounds: list[str] = []


def with_gaps(struck: Sequence[BlowReport], began: float, gaps: Sequence[tuple[float, float]]) -> list[BlowReport]:
    """`began`: on the clock of the gaps."""

    def longest(one: BlowReport) -> float:
        hit_at = began + one.at_s
        return longest_gap(gaps, hit_at, hit_at + (one.whole_after_s or 1e9))

    return [msgspec.structs.replace(one, longest_gap_s=longest(one)) for one in struck]


def judge(report: ChaosReport) -> list[str]:
    """Returns the faults, one sentence each; [] if all is well."""
    traffic = report.traffic
    found = []
    if not traffic.requests:
        found.append("no request was sent while it ran: it shows nothing about requests")
    if traffic.wrong:
        found.append(f"{len(traffic.wrong)} wrong answers, the first: {traffic.wrong[0]}")
    for name, count in sorted((traffic.lost | traffic.failed).items()):
        found.append(f"{count} requests got no whole answer, {name}: {traffic.examples.get(name, '')}")
    for blow in report.blows:
        if blow.whole_after_s is None:
            found.append(f"{blow.name}: {blow.detail}")
    if report.failure:
        found.append(report.failure)
    found += [f"left behind: {left}" for left in report.left_behind]
    return found


def bounds(report: ChaosReport) -> list[str]:
    """Applies the rule of three: what did not happen in N tries happens in less than 3/N of them, with 95% confidence."""
    traffic, found = report.traffic, []
    checked = traffic.right + len(traffic.wrong)
    if checked and not traffic.wrong:
        found.append(f"none of {checked} answers was wrong: fewer than {rule_of_three(checked)} are")
    if traffic.requests and not traffic.unanswered:
        found.append(f"none of {traffic.requests} requests was lost: fewer than {rule_of_three(traffic.requests)} are")
    blows = len(report.blows)
    if blows and not report.faults:
        found.append(f"nothing bad came of {blows} blows: something does of fewer than {rule_of_three(blows)}")
    return found


def rule_of_three(tries: int) -> str:
    return f"{min(1.0, 3 / tries):.3%} (3/N, 95% confidence)"


def print_report(console: Console, report: ChaosReport) -> None:
    table = Table(title=f"{escape(report.model)}: {len(report.blows)} blows, seed {report.seed}", title_justify="left")
    for name, justify in (
        ("after s", "right"), ("blow", "left"), ("process", "left"), ("machine", "left"),
        ("whole again s", "right"), ("longest gap s", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for blow in report.blows:
        table.add_row(
            f"{blow.at_s:.0f}",
            blow.blow if blow.blow == "kill" else f"stop {blow.stop_s:g} s",
            escape(blow.name),
            blow.machine,
            "never" if blow.whole_after_s is None else f"{blow.whole_after_s:.1f}",
            "" if blow.longest_gap_s is None else f"{blow.longest_gap_s:.1f}",
        )
    console.print(table)
    for line in summary(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for fault in report.faults:
        console.print(f"✗ {fault}", style="red", highlight=False, markup=False, soft_wrap=True)
    for bound in report.bounds:
        console.print(f"✓ {bound}", style="green", highlight=False, markup=False, soft_wrap=True)


def summary(report: ChaosReport) -> list[str]:
    traffic = report.traffic
    lines = [
        f"{traffic.requests} requests ({traffic.source}): {traffic.unanswered} without a whole answer, "
        f"{len(traffic.wrong)} wrong, {traffic.refused} refused at the door"
    ]
    if traffic.source == "probes":
        lines[0] += f"; {traffic.right} answers were known and right, {traffic.unchecked} not checked"
    times = [blow.whole_after_s for blow in report.blows if blow.whole_after_s is not None]
    if times:
        lines.append(f"whole again after {median(times):.1f} s (median), {max(times):.1f} s at most")
    if report.blocks_back_after_s is not None:
        lines.append(f"every block was free {report.blocks_back_after_s:.1f} s after the last answer")
    elif traffic.source == "own":
        lines.append("blocks were not counted: the cluster's own traffic went on")
    return lines
