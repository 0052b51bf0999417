"""`tandem doctor`: what this machine offers, what is wrong with it, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.markup import escape

from tandem.cluster.commands.engines import check_as_finding
from tandem.cluster.commands.gpu_checks import gpu_checks
from tandem.cluster.commands.link_checks import link_checks
from tandem.cluster.commands.machine_checks import Check, Finding, Level, checks_for
from tandem.cluster.commands.numa_check import check_numa
from tandem.cluster.commands.output import print_json
from tandem.cluster.config import TandemConfig
from tandem.cluster.pools.placement import of_one_machine, this_machine
from tandem.engine.config import OWN_ENGINE


def doctor(
    config: TandemConfig, console: Console, *, hosts: Sequence[str] = (), as_json: bool = False
) -> int:
    """Returns 1 if a finding is FAIL. `hosts` are the cluster's other machines, whose ports this machine must reach."""
    with Console(stderr=True).status("looking at this machine (about ten seconds)"):
        here = of_one_machine(config)
        numa = {"numa": lambda: check_numa(here, this_machine())}
        engine = {} if config.model.engine == OWN_ENGINE else {"engine": lambda: check_as_finding(config)}
        others = {**numa, **engine, **gpu_checks(), **link_checks(hosts, config.pools)}
        findings = run_checks({**checks_for(here), **others})
    if as_json:
        print_json(findings)
    else:
        show(findings, console)
    return 1 if any(finding.level is Level.FAIL for finding in findings) else 0


def run_checks(checks: Mapping[str, Check]) -> list[Finding]:
    """Runs all checks at once and returns their findings in order. A check that raises is a FAIL finding."""

    def run(subject: str, check: Check) -> Finding:
        try:
            return dataclasses.replace(check(), subject=subject)
        except Exception as error:
            return Finding(
                subject,
                Level.FAIL,
                f"the check itself failed: {type(error).__name__}: {error}",
                "report this",
            )

    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return list(pool.map(run, checks.keys(), checks.values()))


_MARKS = {Level.OK: "[green]OK  [/]", Level.WARN: "[yellow]WARN[/]", Level.FAIL: "[red]FAIL[/]"}


def show(findings: Sequence[Finding], console: Console) -> None:
    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    for finding in findings:
        say(f"{_MARKS[finding.level]} {finding.subject:<10} {escape(finding.what)}")
        if finding.level is not Level.OK:
            say(f"                → {escape(finding.advice)}")
    wrong = [finding for finding in findings if finding.level is not Level.OK]
    if not wrong:
        console.print("\nTandem can run here.")
    elif any(finding.level is Level.FAIL for finding in wrong):
        console.print("\nTandem cannot run here until what FAILs is mended.")
    elif any(finding.is_open for finding in wrong):
        console.print("\nWhether Tandem can run here is not known: some checks were not done in time.")
    else:
        console.print("\nTandem can run here, with the limits above.")
