"""`tandem status`: the cluster on one screen, from its controller and its routers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.base.errors import TandemError
from tandem.cluster.commands.status import fetch_status
from tandem.cluster.control import (
    ClusterView,
    ExchangePhase,
    PoolView,
    RolloutView,
    RouterView,
    SupervisedNode,
)
from tandem.cluster.describe import counted, describe_left_out, format_blocks, format_size, format_tier
from tandem.wire.nodes import NodeState

_COLUMNS = ("node", "role", "machine", "state", "run", "wait", "blocks free", "moving", "KV sent", "received")
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
    console.print(_node_table(view.nodes))
    for node in view.nodes:
        for tier in node.status.tiers if node.status is not None else ():
            console.print(escape(format_tier(node.node_id, tier)), highlight=False)
    for name, why in _reasons(view):
        console.print(f"[yellow]![/] {escape(name)}: {escape(why)}", highlight=False, soft_wrap=True)
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


def _node_table(nodes: list[SupervisedNode]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True, overflow="fold")
    for node in sorted(nodes, key=lambda node: (node.role, node.node_id)):
        table.add_row(escape(node.node_id), node.role.value, escape(node.host or "-"), *_state(node))
    return table


def _state(node: SupervisedNode) -> tuple[str, ...]:
    status = node.status
    if status is None:
        return (node.phase, *["-"] * 6)
    # The node's own report is newer than its supervisor's phase.
    draining = node.phase == "ready" and status.state is NodeState.DRAINING
    counters = status.totals
    return (
        status.state.value if draining else node.phase,
        str(status.running),
        str(status.waiting),
        format_blocks(
            status.free_blocks, status.total_blocks, status.quarantined_blocks, status.pinned_blocks
        ),
        str(status.transfers),
        format_size(counters.transfer_bytes_sent),
        format_size(counters.transfer_bytes_received),
    )


def _reasons(view: ClusterView) -> list[tuple[str, str]]:
    named = [(node.node_id, node.phase, node.restarts, node.detail) for node in view.nodes]
    named += [(router.name, router.phase, router.restarts, router.detail) for router in view.routers]
    reasons = [
        (name, f"{_phase(phase, restarts)}: {detail}") for name, phase, restarts, detail in named if detail
    ]
    reported = [(node.node_id, node.status) for node in view.nodes if node.status is not None]
    reasons += [(name, status.slower) for name, status in reported if status.slower]
    return reasons + [
        (name, describe_left_out(status.left_out)) for name, status in reported if status.left_out
    ]


def _phase(phase: str, restarts: int) -> str:
    """Names the restarts too: a process that keeps dying is ready at most moments."""
    times = f", {restarts} times in a row" if restarts > 1 else ""
    return f"ready again{times}" if phase == "ready" else f"{phase}{times}"
