"""`tandem chaos`: prints what it would do; with `--yes` it does it and reports."""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.base.flags import adder
from tandem.cluster.api_client import ApiClient, checked_url, key_from_environment
from tandem.cluster.chaos.conductor import Conductor
from tandem.cluster.chaos.plan import (
    Blow,
    ChaosRules,
    ProcessKind,
    Strike,
    chosen_kinds,
    dangers,
    make_plan,
    processes_of,
)
from tandem.cluster.chaos.probes import Probes, Traffic
from tandem.cluster.chaos.report import ChaosReport, bounds, judge, print_report, with_gaps
from tandem.cluster.commands.options import add_address
from tandem.cluster.commands.output import add_output, print_found, wants_json
from tandem.cluster.control import ClusterView
from tandem.cluster.orders import TimeoutsOrder, ViewOrder
from tandem.cluster.saving import check_file, results_folder, write_json

if TYPE_CHECKING:
    from tandem.cluster.on_ray.processes import Process
    from tandem.cluster.on_ray.remote_controller import RemoteController

_WIDTH = 120
_INTERRUPTED = "it was interrupted: what came of a blow that was under way is not known"
_FINISHED = re.compile(r'^tandem_request_success_total\{finished_reason="(\w+)"[^}]*\} (\S+)$', re.M)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rules = ChaosRules()
    add_address(parser)
    add = adder(parser)
    add("--minutes", "M", rules.minutes, "how long (%(default)g)")
    add("--every", "S", rules.every_s, "seconds between two blows (%(default)g)")
    parser.add_argument(
        "--blow", choices=[blow.value for blow in Blow], action="append", help="kill or stop (default: both)"
    )
    add("--stop", "S", rules.stop_s, "how long a stop lasts (%(default)g s)")
    parser.add_argument(
        "--to", choices=[kind.value for kind in ProcessKind], action="append", metavar="KIND",
        help="prefill, decode, aggregated, encode, router or controller; may be repeated (default: nodes and the controller, and "
        "routers where there are several)",
    )  # fmt: skip
    add("--seed", "N", rules.seed, "the same seed, the same plan")
    parser.add_argument(
        "--traffic", choices=("probes", "own"), default="probes",
        help="probes: requests of its own, whose answers it knows; own: only what the cluster is asked anyway (%(default)s)",
    )  # fmt: skip
    add("--users", "N", 4, "probes at once (%(default)s)")
    add("--url", None, str, "the router that is asked (default: the cluster's own, which must be reachable from here)")
    add("--out", "FOLDER", Path("results/chaos"), "for the report (%(default)s)")
    add("--yes", None, False, "do it, to the cluster of --address; without this it only says what it would do")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.address import WhichCluster, choose_address
    from tandem.cluster.commands.operate import joined

    rules = ChaosRules(
        minutes=options.minutes, every_s=options.every, stop_s=options.stop, seed=options.seed,
        kinds=tuple(ProcessKind(name) for name in options.to or ()),
        blows=tuple(dict.fromkeys(Blow(name) for name in options.blow or (blow.value for blow in Blow))),
    )  # fmt: skip
    if options.url is not None:
        checked_url(options.url)
    if not 1 <= options.users <= 1000:
        raise ConfigurationError(f"--users must be from 1 to 1000, not {options.users}")
    # Standard output goes to the log while the cluster is joined, and with -o json it is for JSON only.
    console = Console(file=sys.stderr if wants_json(options) else sys.__stdout__, highlight=False)
    which = WhichCluster(options.address, options.name)
    if options.yes and options.address is None:
        raise ConfigurationError(
            "--yes needs --address: without it this would be done to the cluster that is found here, "
            f"{choose_address(which)}"
        )
    if options.yes:  # found out before, not after
        check_file(results_folder(options.out) / "chaos.json")
    with joined(which):
        report = asyncio.run(_run(options, rules, console))
    if isinstance(report, Intent):
        print_found(options, report)
        return 0
    print_found(options, report, lambda: print_report(console, report))
    folder = results_folder(options.out)
    try:
        write_json(report, folder / "chaos.json")
        with (folder / "chaos.txt").open("w", encoding="utf-8") as text:
            print_report(Console(file=text, width=_WIDTH), report)
    except (OSError, ConfigurationError) as error:  # the report has been printed
        print(f"tandem: the report is not kept: {error}", file=sys.stderr)
        return 1
    if not wants_json(options):
        console.print(f"saved: {folder / 'chaos.json'}", style="dim")
    if report.failure == _INTERRUPTED:
        return 130
    return 1 if report.faults else 0


class RayProcessAccess:
    """Finds and signals the processes of the deployment with this name."""

    def __init__(self, name: str, controller: Callable[[str], RemoteController]) -> None:
        self._name = name
        self._controller = controller

    async def view(self) -> ClusterView:
        """Looks the controller up each time, because it may be one of the victims."""
        return await self._controller(self._name).ask(ViewOrder())

    async def find(self, name: str) -> Process:
        from tandem.cluster.on_ray.processes import find_process
        from tandem.cluster.on_ray.runtime import namespace_of

        return await find_process(name, namespace_of(self._name))

    async def send(self, victim: Process, number: signal.Signals, wake_after_s: float | None) -> None:
        from tandem.cluster.on_ray.processes import send_signal

        await send_signal(victim, number, wake_after_s)


class Intent(msgspec.Struct, frozen=True):
    """What the command would do, as JSON."""

    address: str
    model: str
    processes: dict[str, list[str]]
    plan: list[Strike]
    dangers: list[str]


async def _run(options: argparse.Namespace, rules: ChaosRules, console: Console) -> ChaosReport | Intent:
    from tandem.cluster.on_ray.remote_controller import chosen, the_controller

    name = chosen(options.name)
    access = RayProcessAccess(name, the_controller)
    view = await access.view()
    if view.failure:
        raise Unavailable(f"the cluster has failed, and cannot be tested: {view.failure}")
    kinds = chosen_kinds(rules, view)
    plan = make_plan(rules, kinds)
    unresponsive_s = (await the_controller(name).ask(TimeoutsOrder())).unresponsive_s
    stops = rules.stop_s if any(strike.blow is Blow.STOP for strike in plan) else 0.0
    risks = dangers(view, kinds, unresponsive_s, stops)
    for line in describe(view, plan, risks, options.traffic, options.users):
        console.print(line, markup=False, soft_wrap=True)
    if not options.yes:
        from tandem.cluster.on_ray.runtime import own_address

        address = own_address()
        named = f" --name {options.name}" if options.name is not None else ""
        console.print(f"nothing was done: --address {address}{named} --yes does it", style="bold")
        processes = {kind.value: names for kind, names in processes_of(view).items()}
        return Intent(address, view.model, processes, plan, risks)
    conductor = Conductor(access, lambda text: console.print(text, markup=False, style="dim"))
    key = key_from_environment()
    urls = (
        [options.url]
        if options.url
        else list(dict.fromkeys(router.url for router in view.routers if router.phase == "ready"))
    )
    if not urls:
        raise Unavailable("no router of this cluster is ready: wait for one (`tandem status`)")
    turns = iter(range(1 << 62))

    def url() -> str:
        return urls[next(turns) % len(urls)].rstrip("/")

    probes: Probes | None = None
    if options.traffic == "probes":
        probes = Probes(url, key, view.model, rules.seed, options.users)
        checked = await probes.learn()
        console.print(
            f"asked before the first blow: {checked} of {len(probes.questions)} questions always have the same answer",
            style="dim",
        )
    before = finished(urls, key)
    interrupted = False
    try:
        await _carry_out(conductor, plan, probes, rules.minutes * 60)
    except asyncio.CancelledError:  # what was seen until then is reported
        interrupted = True
    traffic = probes.counts if probes else own_traffic(before, finished(urls, key))
    back_s, left = await conductor.until_quiet() if probes and not interrupted else (None, [])
    report = ChaosReport(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["tandem", *sys.argv[1:]]),
        model=view.model,
        seed=rules.seed,
        minutes=rules.minutes,
        blows=with_gaps(conductor.struck, conductor.began, probes.gaps) if probes else conductor.struck,
        traffic=traffic,
        blocks_back_after_s=back_s,
        left_behind=left,
        failure=_INTERRUPTED if interrupted else conductor.failure,
    )
    report.faults = judge(report)
    report.bounds = bounds(report)
    return report


async def _carry_out(
    conductor: Conductor[Process], plan: Sequence[Strike], probes: Probes | None, seconds: float
) -> None:
    """Runs the blows and the traffic side by side. Traffic goes on until the cluster is whole after the last blow and the time is up."""
    ending = asyncio.Event()
    asking = asyncio.create_task(probes.run(ending)) if probes else None
    try:
        began = asyncio.get_running_loop().time()
        await conductor.run(plan)
        await asyncio.sleep(max(0.0, began + seconds - asyncio.get_running_loop().time()))
        ending.set()
        if asking is not None:
            await asking
    finally:
        if asking is not None and not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


def describe(view: ClusterView, plan: Sequence[Strike], risks: Sequence[str], traffic: str, users: int) -> list[str]:
    """Returns what would be done to which cluster, one line each."""
    there = processes_of(view)
    lines = [f"{view.model}: " + ", ".join(f"{len(names)} {kind.value}" for kind, names in there.items())]
    lines.append(
        f"traffic: {users} probes at once, with answers that are known" if traffic == "probes"
        else "traffic: the cluster's own; whether its answers are right is not known"
    )  # fmt: skip
    for strike in plan:
        what = "kill" if strike.blow is Blow.KILL else f"stop for {strike.stop_s:g} s"
        lines.append(f"  after {strike.at_s:6.0f} s: {what} {strike.choose(there[strike.kind])}")
    lines += [f"! {risk}" for risk in risks]
    return lines


def finished(urls: Sequence[str], key: str | None) -> dict[str, float]:
    """Returns how many sequences ended for each reason, summed over all routers that answer."""
    found: dict[str, float] = {}
    for url in urls:
        client = ApiClient(url, key)
        try:
            text = client.get("/metrics").text
        except TandemError:
            continue  # it may be the last victim
        finally:
            client.close()
        for reason, count in finished_in(text).items():
            found[reason] = found.get(reason, 0.0) + count
    return found


def finished_in(metrics: str) -> dict[str, float]:
    return {reason: float(count) for reason, count in _FINISHED.findall(metrics)}


def own_traffic(before: dict[str, float], after: dict[str, float]) -> Traffic:
    """Returns what ended between the two counts. A router that was killed counts from 0 again, so what it had counted is left out."""
    ended = {reason: round(max(0.0, count - before.get(reason, 0.0))) for reason, count in after.items()}
    errors = ended.get("error", 0)
    return Traffic("own", requests=sum(ended.values()), failed={"error": errors} if errors else {})
