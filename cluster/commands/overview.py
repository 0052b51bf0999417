"""`tandem status`: the cluster on one screen, from its controller and its routers, or from one router."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from tandem.base.errors import TandemError
from tandem.cluster.api_client import ApiClient
from tandem.cluster.commands.node_table import Column, node_table, show_notes
from tandem.cluster.control import (
    ClusterView,
    ControllerDecision,
    ExchangePhase,
    PoolView,
    RolloutView,
    RouterView,
    SupervisedNode,
)
from tandem.cluster.describe import counted, format_size
from tandem.router.page_state import NodeRow, PageState, PoolRow, ProcessState, RouterState, TierRow
from tandem.wire.forecasts import ForecastScore
from tandem.wire.nodes import NodeState
from tandem.wire.requests import NO_COUNTERS

_DECISIONS = 8
_EXCHANGES = {
    ExchangePhase.CHECKING: "a new one checks whether it can read this one's state",
    ExchangePhase.REPLACING: "a new one takes its place",
    ExchangePhase.RESTORING: "the old one is started again",
    ExchangePhase.FAILED: "the old one, because a new one could not take its place",
}
_KV: tuple[Column, ...] = (
    ("KV sent", lambda row: format_size(row.bytes_sent)),
    ("received", lambda row: format_size(row.bytes_received)),
)

Answer = RouterState | TandemError  # what a router said of itself, or why it said nothing
Fetch = Callable[[str, str | None], PageState]


def fetch_page(url: str, key: str | None) -> PageState:
    with closing(ApiClient(url, key)) as api:
        return api.read("/ui/state", PageState)


@dataclass(frozen=True, slots=True)
class RouterOverview:
    """A router, and what it answered if it was asked."""

    name: str
    url: str
    answer: Answer | None = None
    phase: str = ""  # as its supervisor knows it, if that was asked
    note: str = ""

    @property
    def trouble(self) -> str:
        """Why a request to it would be refused, as it says itself."""
        if not isinstance(self.answer, RouterState):
            return ""
        process = self._process
        return self.answer.unhealthy or (process is not None and process.unhealthy) or ""

    @property
    def serves(self) -> bool:
        """A router that this machine cannot reach counts as able to: its address can be its machine's loopback."""
        return self.answer is not None and not self.trouble

    @property
    def _process(self) -> ProcessState | None:
        """What is known of it, if another router process on the port answered, for all of them."""
        processes = self.answer.processes if isinstance(self.answer, RouterState) else []
        return next((process for process in processes if process.name == self.name), None)

    def describe(self) -> str:
        answer, process = self.answer, self._process
        if answer is None:
            return f"[red]{escape(self.phase)}[/]"
        if isinstance(answer, TandemError):
            return f"ready; {escape(str(answer))}"
        if not answer.unhealthy and process is not None and not process.answers:
            return "ready, but it does not answer the other processes on its port"
        load, why = process or answer, self.trouble
        health = f"[red]unavailable[/]: {escape(why)}" if why else "[green]serving[/]"
        draining = ", draining" if answer.draining else ""
        return f"{health}, {counted(load.running, 'request')} running, {load.queued} queued{draining}"


@dataclass(frozen=True, slots=True)
class Overview:
    model: str
    routers: list[RouterOverview]
    nodes: list[NodeRow]
    json: Callable[[], dict[str, Any]]
    above: list[str]  # lines above the nodes: what is under way, and the pools
    below: list[str] = field(default_factory=list)
    machines: Mapping[str, str] | None = None  # by node; None: they are not known
    failure: str = ""

    @classmethod
    def of(cls, view: ClusterView, key: str | None, fetch: Fetch = fetch_page) -> Overview:
        """As the controller knows it. Asks the ready routers, too."""

        def answer(router: RouterView) -> Answer | None:
            try:
                return fetch(router.url, key).router if router.phase == "ready" else None
            except TandemError as error:
                return error

        answers = {each.name: answer(each) for each in view.routers}
        return cls(
            model=view.model,
            routers=[
                RouterOverview(each.name, each.url, answers[each.name], each.phase, _note(each))
                for each in view.routers
            ],
            nodes=[_node_row(node) for node in view.nodes],
            json=lambda: _as_json(view, answers),
            above=[
                *_under_way(view),
                *map(_pool_line, view.pools),
                *_forecasts(view.foresight.score if view.foresight is not None else ForecastScore()),
            ],
            below=_decisions(view.decisions),
            machines={node.node_id: node.host or "-" for node in view.nodes},
            failure=view.failure,
        )

    @classmethod
    def of_router(cls, url: str, key: str | None, fetch: Fetch = fetch_page) -> Overview:
        page = fetch(url, key)
        silent = [one.name for one in page.router.processes if not one.answers]
        note = f"no answer from {', '.join(silent)}: not counted" if silent else ""
        return cls(
            model=page.router.model,
            routers=[RouterOverview("", url, page.router, note=note)],
            nodes=page.nodes,
            json=lambda: _cluster_of(url, key),
            above=[*_paused(page.router.paused), *map(_pool_line, page.pools), *_forecasts(page.router.forecasts)],
        )

    @property
    def serves(self) -> bool:
        """Whether some router could answer a request."""
        return not self.failure and any(router.serves for router in self.routers)

    def show(self, console: Console) -> None:
        def say(*lines: str) -> None:
            for line in lines:
                console.print(line, highlight=False, soft_wrap=True)

        say(f"[bold]{escape(self.model)}[/]")
        say(*(f"{escape(f'{one.name} {one.url}'.strip())}: {one.describe()}" for one in self.routers))
        say(*self.above)
        self._show_nodes(console)
        for router in self.routers:
            show_notes(router.name or "router", filter(None, [router.note]), console)
        if self.failure:
            say(f"[red]✗[/] {escape(self.failure)}")
        say(*self.below)

    def _show_nodes(self, console: Console) -> None:
        rows, machines = sorted(self.nodes, key=lambda row: (row.role, row.node_id)), self.machines
        where: tuple[Column, ...] = ()
        if machines is not None:
            where = (("role", lambda row: row.role), ("machine", lambda row: machines[row.node_id]))
        console.print(node_table(rows, where, _KV), soft_wrap=True)
        for line in _memory_lines(rows, machines):
            console.print(escape(line), highlight=False, soft_wrap=True)
        for row in rows:
            for tier in row.tiers:
                console.print(escape(_tier_line(row.node_id, tier)), highlight=False)
        for row in rows:
            show_notes(row.node_id, filter(None, [row.why, *row.notes]), console)


def _memory_lines(rows: Sequence[NodeRow], machines: Mapping[str, str] | None) -> Iterator[str]:
    """What each node has of its machine's memory; and all together, with weights that they share counted once for each machine."""
    has = {row.node_id: row.memory for row in rows if row.memory is not None}
    for node_id, memory in has.items():
        shared = " (shared)" if memory.shared else ""
        sizes = format_size(memory.weights) + shared, format_size(memory.kv), format_size(memory.own)
        yield "memory of {}: weights {}, KV {}, its own {}".format(node_id, *sizes)
    if machines is not None and any(memory.shared for memory in has.values()):
        once = {machines[node_id]: memory.weights for node_id, memory in has.items() if memory.shared}
        apart = sum(memory.kv + memory.own + (not memory.shared) * memory.weights for memory in has.values())
        yield f"memory of all nodes: {format_size(apart + sum(once.values()))}, shared weights counted once"


def _paused(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"[yellow]paused[/]: {escape(', '.join(names))}"


def _forecasts(score: ForecastScore) -> Iterator[str]:
    yield from (f"[dim]forecast[/]: {escape(line)}" for line in score.said)


def _under_way(view: ClusterView) -> Iterator[str]:
    yield from _paused(view.paused)
    if view.rollout is not None:
        yield f"[yellow]rollout[/]: {escape(rollout_line(view.rollout))}"
    exchange = view.exchange
    if exchange is not None and exchange.phase is not ExchangePhase.DONE:
        why = f": {exchange.why}" if exchange.why else ""
        yield f"[yellow]controller[/]: {escape(f'{_EXCHANGES[exchange.phase]}{why}')}"


def _decisions(decisions: Sequence[ControllerDecision]) -> list[str]:
    times = [time.strftime("%H:%M:%S", time.localtime(each.unix_time)) for each in decisions]
    lines = [f"[dim]{at}[/]  {escape(each.text)}" for at, each in zip(times, decisions, strict=True)]
    return lines[-_DECISIONS:]


def _as_json(view: ClusterView, answers: Mapping[str, Answer | None]) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(view)
    for node, seen in zip(plain["nodes"], view.nodes, strict=True):
        if seen.status is not None:
            node["status"]["counters"] = seen.status.totals.in_full()
            node["status"].pop("epoch", None)  # a secret: messages with it count as the node's own
    for pool in plain["pools"]:
        pool["max_nodes"] = pool["max_nodes"] or None
    for router in plain["routers"]:
        answer = answers[router["name"]]
        router["answer"] = msgspec.to_builtins(answer) if isinstance(answer, RouterState) else None
        if isinstance(answer, TandemError):
            router["unreachable"] = str(answer)
    return plain


def _cluster_of(url: str, key: str | None) -> dict[str, Any]:
    with closing(ApiClient(url, key)) as api:
        return api.read("/cluster", dict[str, Any])


def _node_row(node: SupervisedNode) -> NodeRow:
    status, state = node.status, node.phase
    # The restarts are named, too: a process that keeps dying is ready at most moments.
    detail = _note(node)
    # The node's own report is newer than its supervisor's phase.
    if status is not None and state == "ready" and status.state is NodeState.DRAINING:
        state = status.state.value
    why = detail if node.phase != "ready" else ""
    counters = status.totals if status is not None else NO_COUNTERS
    row = NodeRow.of(node.node_id, node.role.value, state, why, status, counters)
    return row if why or not detail else msgspec.structs.replace(row, notes=[detail, *row.notes])


def _note(one: SupervisedNode | RouterView) -> str:
    if not one.detail:
        return ""
    times = f", {one.restarts} times in a row" if one.restarts > 1 else ""
    phase = "ready again" if one.phase == "ready" else one.phase
    return f"{phase}{times}: {one.detail}"


def rollout_line(rollout: RolloutView) -> str:
    left = f"{len(rollout.left)} old left" + (f" ({', '.join(rollout.left[:8])})" if rollout.left else "")
    line = f"{rollout.replaced} new serve, {left}"
    if rollout.going_back:
        line = f"going back ({rollout.going_back}): {line}"
    return line + (f"; waits: {rollout.waits}" if rollout.waits else "")


def _pool_line(pool: PoolView | PoolRow) -> str:
    state = f"{pool.ready} of {counted(pool.wanted, 'node')} ready"
    if isinstance(pool, PoolRow):
        role, waiting = pool.role, pool.waiting
        state += f", {pool.starting} starting" if pool.starting else ""
    else:
        role, waiting = pool.role.value, pool.waiting_for_machines
        state += f", between {pool.min_nodes} and {pool.max_nodes}" if pool.max_nodes else ""
    return f"{role}: {state}" + (f", [yellow]{counted(waiting, 'node')} without a machine[/]" if waiting else "")


def _tier_line(node_id: str, tier: TierRow) -> str:
    """Describes how full the tier is, how often it had what was looked for, and how much came from other nodes."""
    room = f" of {format_size(tier.total_bytes)}" if tier.total_bytes else " known to be there"
    said = [f"{tier.name} tier of {node_id}: {format_size(tier.used_bytes)}{room}"]
    if tier.asked_tokens:
        found = 100 * tier.found_tokens / tier.asked_tokens
        said.append(f"had {found:.0f}% of {counted(tier.asked_tokens, 'token')} that the device had not")
    if tier.fetched_bytes:
        said.append(f"{format_size(tier.fetched_bytes)} were copied from other nodes")
    if tier.mirrored_bytes:
        said.append(f"{format_size(tier.mirrored_bytes)} mirrored")
    return ", ".join(said)
