"""`tandem status --url`: the cluster on one screen, from one router."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.base.errors import InternalError
from tandem.cluster.api_client import ApiClient
from tandem.cluster.describe import counted, describe_left_out, format_blocks, format_size, format_tier
from tandem.wire.requests import TierStatus

_COLUMNS = ("node", "state", "run", "wait", "blocks free", "moving", "KV sent", "received")


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


def show_status(cluster: dict[str, Any], console: Console) -> int:
    """Prints the status. Returns 1 if a request could not be answered now."""
    router, nodes = cluster["router"], cluster["nodes"]
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
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True, overflow="fold")
    for node in sorted(nodes, key=lambda node: (node["role"], node["node_id"])):
        table.add_row(*_row(node))
    console.print(table)
    for node in nodes:
        for tier in node.get("tiers", ()):
            line = format_tier(node["node_id"], msgspec.convert(tier, TierStatus))
            console.print(escape(line), highlight=False)
    for node in nodes:
        for reason in filter(None, (node.get("detail") or node.get("unusable"), node.get("slower"))):
            console.print(f"[yellow]![/] {escape(node['node_id'])}: {escape(str(reason))}", highlight=False)
        if left_out := node.get("left_out"):
            console.print(
                f"[yellow]![/] {escape(node['node_id'])}: {escape(describe_left_out(left_out))}",
                highlight=False,
            )
    return 1 if unhealthy else 0


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    counters = node.get("counters", {})
    blocks = "-"
    if "total_blocks" in node:
        blocks = format_blocks(
            node["free_blocks"],
            node["total_blocks"],
            node.get("quarantined_blocks", 0),
            node.get("pinned_blocks", 0),
        )
    return (
        escape(node["node_id"]),
        node["state"],
        str(node.get("running", "-")),
        str(node.get("waiting", "-")),
        blocks,
        str(node.get("transfers", "-")),
        format_size(counters.get("transfer_bytes_sent", 0)),
        format_size(counters.get("transfer_bytes_received", 0)),
    )
