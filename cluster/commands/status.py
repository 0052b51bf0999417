"""`tandem status --url`: the cluster on one screen, from one router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from tandem.base.errors import InternalError
from tandem.cluster.api_client import ApiClient
from tandem.cluster.commands.node_lines import seen_by_router, show_nodes
from tandem.cluster.describe import counted


def fetch_status(url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> dict[str, Any]:
    api = ApiClient(url, key, transport)
    try:
        cluster = api.get("/cluster").json()
    except ValueError:
        cluster = None
    finally:
        api.close()
    if not isinstance(cluster, dict) or not isinstance(cluster.get("nodes"), list):
        raise InternalError(f"{url}/cluster did not answer like a Tandem router")
    return cluster


@dataclass(frozen=True, slots=True)
class RouterOverview:
    """One look at a cluster, from one router."""

    cluster: dict[str, Any]

    @property
    def serves(self) -> bool:
        return not self.cluster["router"]["unhealthy"]

    def plain(self) -> dict[str, Any]:
        return self.cluster

    def show(self, console: Console) -> None:
        router = self.cluster["router"]
        unhealthy = router["unhealthy"]
        health = f"[red]unavailable[/]: {escape(unhealthy)}" if unhealthy else "[green]serving[/]"
        console.print(
            f"{escape(router['model'])}: {health}; {counted(router['running'], 'request')} running, "
            f"{router['queued']} queued{', draining' if router['draining'] else ''}",
            highlight=False,
        )
        if silent := [one["name"] for one in router.get("processes", ()) if not one["answers"]]:
            console.print(
                f"[yellow]![/] no answer from {escape(', '.join(silent))}: not counted", highlight=False
            )
        show_nodes(seen_by_router(self.cluster), console, machines=False)
