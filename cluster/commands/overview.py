"""`tandem status`: the cluster on one screen, from its controller and its routers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Overview:
    """One look at a cluster."""

    view: ClusterView  # its controller's
    answers: dict[
        str, dict[str, Any] | TandemError
    ]  # what each ready router said of itself, or why it said nothing

    @classmethod
    def of(cls, view: ClusterView, key: str | None, fetch: Fetch = fetch_status) -> Overview:
        def answer(url: str) -> dict[str, Any] | TandemError:
            try:
                answered: dict[str, Any] = fetch(url, key)["router"]
            except TandemError as error:
                return error
            return answered

        return cls(view, {each.name: answer(each.url) for each in view.routers if each.phase == "ready"})

    @property
    def serves(self) -> bool:
        """Whether some router could answer a request. A router that this machine cannot reach counts as able to: its address can be
        its machine's loopback."""
        return not self.view.failure and any(not self._unhealthy(name) for name in self.answers)

    def _unhealthy(self, name: str) -> str:
        answer = self.answers[name]
        if isinstance(answer, TandemError):
            return ""
        process = _process_of(answer, name)
        return str(answer["unhealthy"] or (process is not None and process["unhealthy"]) or "")

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self.view)
        for node, seen in zip(plain["nodes"], self.view.nodes, strict=True):
            if seen.status is not None:
                node["status"]["counters"] = seen.status.totals.in_full()
                node["status"].pop("epoch", None)  # a secret: messages with it count as the node's own
        for pool in plain["pools"]:
            pool["max_nodes"] = pool["max_nodes"] or None
        for router in plain["routers"]:
            answer = self.answers.get(router["name"])
            router["answer"] = None if isinstance(answer, TandemError) else answer
            if isinstance(answer, TandemError):
                router["unreachable"] = str(answer)
        return plain

    def show(self, console: Console) -> None:
        def say(line: str) -> None:
            console.print(line, highlight=False, soft_wrap=True)

        view = self.view
        say(f"[bold]{escape(view.model)}[/]")
        for router in view.routers:
            say(f"{escape(router.name)} {escape(router.url)}: {self._state_of(router)}")
        if view.paused:
            say(f"[yellow]paused[/]: {escape(', '.join(view.paused))}")
        if view.rollout is not None:
            say(f"[yellow]rollout[/]: {escape(rollout_line(view.rollout))}")
        if view.exchange is not None and view.exchange.phase is not ExchangePhase.DONE:
            why = f": {view.exchange.why}" if view.exchange.why else ""
            say(f"[yellow]controller[/]: {escape(f'{_EXCHANGES[view.exchange.phase]}{why}')}")
        for pool in view.pools:
            say(_pool_line(pool))
        show_nodes(map(seen_by_controller, view.nodes), console, machines=True)
        for one in view.routers:
            if one.detail:
                show_notes(one.name, [f"{described_phase(one.phase, one.restarts)}: {one.detail}"], console)
        if view.failure:
            say(f"[red]✗[/] {escape(view.failure)}")
        for decision in view.decisions[-_DECISIONS:]:
            at = time.strftime("%H:%M:%S", time.localtime(decision.unix_time))
            say(f"[dim]{at}[/]  {escape(decision.text)}")

    def _state_of(self, router: RouterView) -> str:
        answer = self.answers.get(router.name)
        if answer is None:
            return f"[red]{escape(router.phase)}[/]"
        if isinstance(answer, TandemError):
            return f"ready; {escape(str(answer))}"
        # Another router process on the port may have answered, for all of them.
        process = _process_of(answer, router.name)
        if not answer["unhealthy"] and process is not None and not process["answers"]:
            return "ready, but it does not answer the other processes on its port"
        if why := self._unhealthy(router.name):
            return f"[red]unavailable[/]: {escape(why)}"
        load = process or answer
        draining = ", draining" if answer["draining"] else ""
        return f"[green]serving[/], {counted(load['running'], 'request')} running, {load['queued']} queued{draining}"


def _process_of(answer: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((process for process in answer.get("processes", ()) if process["name"] == name), None)


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
