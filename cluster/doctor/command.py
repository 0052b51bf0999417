"""`tandem doctor`: what this machine offers, what is wrong with it, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.markup import escape

from tandem.base.errors import ConfigurationError
from tandem.base.own_thread import in_own_thread
from tandem.cluster.commands.engines import check_engine
from tandem.cluster.commands.output import add_output, print_json, wants_json
from tandem.cluster.commands.setting_options import add_settings, read_settings
from tandem.cluster.config import TandemConfig
from tandem.cluster.doctor.gpu_checks import gpu_checks
from tandem.cluster.doctor.link_checks import link_checks
from tandem.cluster.doctor.machine_checks import Check, Finding, Level, checks_for
from tandem.cluster.doctor.numa_check import check_numa
from tandem.cluster.pools.placement import of_one_machine, this_machine
from tandem.engine.config import OWN_ENGINE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument(
        "--reach",
        action="append",
        default=[],
        metavar="HOST",
        help="also check that this machine reaches the ports of HOST, another machine of the cluster (repeatable)",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    config = read_settings(options).config
    return doctor(config, Console(), hosts=options.reach, as_json=wants_json(options))


def doctor(config: TandemConfig, console: Console, *, hosts: Sequence[str] = (), as_json: bool = False) -> int:
    """Returns 1 if a finding is FAIL. `hosts` are the cluster's other machines, whose ports this machine must reach."""
    with Console(stderr=True).status("looking at this machine (about ten seconds)") as shown:
        here = of_one_machine(config)
        numa = {"numa": lambda: check_numa(here, this_machine())}
        engine = {} if config.model.engine == OWN_ENGINE else {"engine": lambda: check_other_engine(config)}
        others = {**numa, **engine, **gpu_checks(), **link_checks(hosts, config.pools)}
        findings = run_checks(
            {**checks_for(here), **others},
            lambda left: shown.update(f"looking at this machine, still at {', '.join(left[:4])}"),
        )
    if as_json:
        print_json(findings)
    else:
        show(findings, console)
    return 1 if any(finding.level is Level.FAIL for finding in findings) else 0


def check_other_engine(config: TandemConfig) -> Finding:
    try:
        found = check_engine(config)
    except ConfigurationError as error:
        return Finding("engine", Level.FAIL, f"{config.model.engine} cannot run", str(error))
    assert found is not None
    return Finding("engine", Level.OK, f"{found.name} {found.version} of {found.python}, for {found.device}")


def run_checks(checks: Mapping[str, Check], report: Callable[[list[str]], object] = lambda left: None) -> list[Finding]:
    """Runs all checks at once and returns their findings in order. A check that raises is a FAIL finding. `report` gets the names of
    those that are not done."""
    left = list(checks)

    def run(subject: str, check: Check) -> Finding:
        try:
            found = dataclasses.replace(check(), subject=subject)
        except Exception as error:
            what = f"the check itself failed: {type(error).__name__}: {error}"
            found = Finding(subject, Level.FAIL, what, "report this")
        left.remove(subject)
        report(list(left))
        return found

    # After Ctrl-C no check is waited for.
    begun = [in_own_thread(subject, partial(run, subject, check)) for subject, check in checks.items()]
    return [each.result() for each in begun]


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
