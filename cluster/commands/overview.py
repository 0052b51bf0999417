"""`tandem status`: the cluster on one screen, from its controller and its routers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from tandem.base.errors import TandemError
from tandem.cluster.commands.node_lines import described_phase, seen_by_controller, show_nodes, show_notes
from tandem.cluster.commands.status import fetch_status
from tandem.cluster.control import (
    ClusterView,
    ExchangePhase,
    PoolView,
    RolloutView,
    RouterView,
)
from tandem.cluster.describe import counted

_DECISIONS = 8
_EXCHANGES = {
    ExchangePhase.CHECKING: "a new one checks whether it can read this one's state",
    ExchangePhase.REPLACING: "a new one takes its place",
    ExchangePhase.RESTORING: "the old one is started again",
    ExchangePhase.FAILED: "the old one, because a new one could not take its place",
}

Fetch = Callable[[str, str | None], dict[str, Any]]


def show_overview(view: ClusterView, key: str | None, console: Console, fetch: Fetch = fetch_status) -> int:
    """Prints the overview. Returns 1 if a request could not be answered now."""
    answers = 0
    console.print(f"[bold]{escape(view.model)}[/]", highlight=False)
    for router in view.routers:
        line, serves = _router_line(router, key, fetch)
        answers += serves
        console.print(line, highlight=False, soft_wrap=True)
    if view.paused:
        console.print(f"[yellow]paused[/]: {escape(', '.join(view.paused))}", highlight=False)
    if view.rollout is not None:
        console.print(
            f"[yellow]rollout[/]: {escape(rollout_line(view.rollout))}", highlight=False, soft_wrap=True
        )
    if view.exchange is not None and view.exchange.phase is not ExchangePhase.DONE:
        why = f": {view.exchange.why}" if view.exchange.why else ""
        line = f"{_EXCHANGES[view.exchange.phase]}{why}"
        console.print(f"[yellow]controller[/]: {escape(line)}", highlight=False, soft_wrap=True)
    for pool in view.pools:
        console.print(_pool_line(pool), highlight=False)
    show_nodes(map(seen_by_controller, view.nodes), console, machines=True)
    for one in view.routers:
        if one.detail:
            show_notes(one.name, [f"{described_phase(one.phase, one.restarts)}: {one.detail}"], console)
    if view.failure:
        console.print(f"[red]✗[/] {escape(view.failure)}", highlight=False, soft_wrap=True)
    for decision in view.decisions[-_DECISIONS:]:
        at = time.strftime("%H:%M:%S", time.localtime(decision.unix_time))
        console.print(f"[dim]{at}[/]  {escape(decision.text)}", highlight=False, soft_wrap=True)
    return 0 if answers and not view.failure else 1


def overview(view: ClusterView, key: str | None, fetch: Fetch = fetch_status) -> dict[str, Any]:
    """Returns the overview as JSON: the controller's view, and for each router its own answer or why there was none."""
    plain: dict[str, Any] = msgspec.to_builtins(view)
    for node, seen in zip(plain["nodes"], view.nodes, strict=True):
        if seen.status is not None:
            node["status"]["counters"] = seen.status.totals.in_full()
            node["status"].pop("epoch", None)  # a secret: messages with it count as the node's own
    for pool in plain["pools"]:
        pool["max_nodes"] = pool["max_nodes"] or None
    for router in plain["routers"]:
        try:
            router["answer"] = fetch(router["url"], key)["router"] if router["phase"] == "ready" else None
        except TandemError as error:
            router["answer"], router["unreachable"] = None, str(error)
    return plain


def answers_now(plain: dict[str, Any]) -> bool:
    """Returns whether some router could answer a request. A router that this machine cannot reach counts as able to."""
    ready = [router for router in plain["routers"] if router["phase"] == "ready"]
    serving = any("unreachable" in router or not router["answer"]["unhealthy"] for router in ready)
    return serving and not plain["failure"]


def _router_line(router: RouterView, key: str | None, fetch: Fetch) -> tuple[str, bool]:
    where = f"{escape(router.name)} {escape(router.url)}"
    if router.phase != "ready":
        return f"{where}: [red]{escape(router.phase)}[/]", False
    try:
        seen = fetch(router.url, key)["router"]
    except TandemError as error:
        # Maybe it is only unreachable from here: its address can be its machine's loopback.
        return f"{where}: ready; {escape(str(error))}", True
    if seen["unhealthy"]:
        return f"{where}: [red]unavailable[/]: {escape(seen['unhealthy'])}", False
    draining = ", draining" if seen["draining"] else ""
    # Another router process on the port may have answered, for all of them.
    for process in seen.get("processes", ()):
        if process["name"] == router.name:
            if not process["answers"]:
                return f"{where}: ready, but it does not answer the other processes on its port", True
            if process["unhealthy"]:
                return f"{where}: [red]unavailable[/]: {escape(process['unhealthy'])}", False
            seen = process
    load = f"{counted(seen['running'], 'request')} running, {seen['queued']} queued{draining}"
    return f"{where}: [green]serving[/], {load}", True


def rollout_line(rollout: RolloutView) -> str:
    left = f"{len(rollout.left)} left" + (f" ({', '.join(rollout.left[:8])})" if rollout.left else "")
    line = f"{rollout.replaced} replaced, {left}"
    if rollout.going_back:
        line = f"going back ({rollout.going_back}): {line}"
    return line + (f"; waits: {rollout.waits}" if rollout.waits else "")


def _pool_line(pool: PoolView) -> str:
    state = f"{pool.ready} of {counted(pool.wanted, 'node')} ready"
    if pool.max_nodes:
        state += f", between {pool.min_nodes} and {pool.max_nodes}"
    if pool.waiting_for_machines:
        state += f", [yellow]{counted(pool.waiting_for_machines, 'node')} without a machine[/]"
    return f"{pool.role.value}: {state}"
