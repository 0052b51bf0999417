"""`tandem status --all`: the deployments on one Ray cluster, a line each."""

from __future__ import annotations

import asyncio

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.base.errors import TandemError
from tandem.base.own_thread import from_own_thread
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.commands.operate import joined, while_ray_runs
from tandem.cluster.control import ClusterView
from tandem.cluster.orders import ViewOrder

_COLUMNS = ("name", "model", "address", "nodes ready", "state")


class StandingDeployment(msgspec.Struct, frozen=True):
    name: str
    model: str = ""
    urls: list[str] = []  # of the routers that serve
    ready: dict[str, int] = {}  # nodes, by role
    wanted: dict[str, int] = {}
    trouble: str = ""  # why it does not serve, or does not answer

    @property
    def serves(self) -> bool:
        return bool(self.urls) and not self.trouble


def list_deployments(which: WhichCluster) -> list[StandingDeployment]:
    with joined(which):
        from tandem.cluster.on_ray.remote_controller import standing, the_controller

        async def look(name: str) -> StandingDeployment:
            try:
                controller = await from_own_thread("find-controller", lambda: the_controller(name))
                return described(name, await controller.ask(ViewOrder()))
            except TandemError as error:
                return StandingDeployment(name, trouble=str(error))

        async def run() -> list[StandingDeployment]:
            return list(await asyncio.gather(*map(look, await from_own_thread("find-deployments", standing))))

        return asyncio.run(while_ray_runs(run()))


def described(name: str, view: ClusterView) -> StandingDeployment:
    writers = sum(pool.ready for pool in view.pools if pool.role.writes_answers)
    return StandingDeployment(
        name,
        view.model,
        [router.url for router in view.routers if router.phase == "ready"],
        {pool.role.value: pool.ready for pool in view.pools},
        {pool.role.value: pool.wanted for pool in view.pools},
        view.failure or ("" if writers else "no node that can decode is ready"),
    )


def show_deployments(found: list[StandingDeployment], console: Console) -> None:
    if not found:
        console.print("Tandem does not run on this Ray cluster")
        return
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True, overflow="fold")
    for one in found:
        nodes = ", ".join(f"{role} {one.ready[role]} of {wanted}" for role, wanted in one.wanted.items())
        state = "[green]serving[/]" if one.serves else f"[red]{escape(one.trouble or 'no router serves')}[/]"
        table.add_row(escape(one.name), escape(one.model), escape(" ".join(one.urls)), nodes, state)
    console.print(table)
