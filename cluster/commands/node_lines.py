"""The nodes in `tandem status`, whether a controller or a router was asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.cluster.control import SupervisedNode
from tandem.cluster.describe import describe_left_out, format_blocks, format_size, format_tier
from tandem.wire.nodes import NodeState
from tandem.wire.requests import NO_COUNTERS, NodeCounters, SickDevice, TierStatus

_LOAD = ("run", "wait", "blocks free", "moving", "KV sent", "received")


class NodeLine(msgspec.Struct, frozen=True):
    """What is shown of a node. Its fields are those of a node in /cluster, and of a NodeStatus."""

    node_id: str
    role: str
    state: str
    host: str = ""
    running: int | None = None  # None: it has reported nothing
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    quarantined_blocks: int = 0
    pinned_blocks: int = 0
    transfers: int = 0
    counters: NodeCounters = NO_COUNTERS
    tiers: tuple[TierStatus, ...] = ()
    left_out: tuple[str, ...] = ()
    detail: str = ""
    unusable: str | None = None
    slower: str = ""
    sick: tuple[SickDevice, ...] = ()

    def load(self) -> Sequence[str]:
        if self.running is None:
            return ["-"] * len(_LOAD)
        free, total = self.free_blocks, self.total_blocks
        return (
            str(self.running),
            str(self.waiting),
            format_blocks(free, total, self.quarantined_blocks, self.pinned_blocks),
            str(self.transfers),
            format_size(self.counters.transfer_bytes_sent),
            format_size(self.counters.transfer_bytes_received),
        )

    def notes(self) -> Iterable[str]:
        left_out = describe_left_out(self.left_out) if self.left_out else ""
        sick = (f"{each.device}: {each.why}" for each in self.sick)
        return filter(None, (self.detail or self.unusable, *sick, self.slower, left_out))


_REPORTED = {*NodeLine.__struct_fields__} - {
    "node_id",
    "role",
    "state",
    "host",
    "detail",
    "unusable",
    "counters",
}


def seen_by_router(cluster: dict[str, Any]) -> list[NodeLine]:
    return msgspec.convert(cluster["nodes"], list[NodeLine])


def seen_by_controller(node: SupervisedNode) -> NodeLine:
    status, phase = node.status, node.phase
    # The restarts are named, too: a process that keeps dying is ready at most moments.
    detail = f"{described_phase(phase, node.restarts)}: {node.detail}" if node.detail else ""
    line = NodeLine(node.node_id, node.role.value, phase, node.host, detail=detail)
    if status is None:
        return line
    # The node's own report is newer than its supervisor's phase.
    draining = phase == "ready" and status.state is NodeState.DRAINING
    return msgspec.structs.replace(
        line,
        state=status.state.value if draining else phase,
        counters=status.totals,
        **{name: getattr(status, name) for name in _REPORTED},
    )


def described_phase(phase: str, restarts: int) -> str:
    times = f", {restarts} times in a row" if restarts > 1 else ""
    return f"ready again{times}" if phase == "ready" else f"{phase}{times}"


def show_nodes(lines: Iterable[NodeLine], console: Console, *, machines: bool) -> None:
    """`machines`: with each node's role and machine."""
    table = Table(box=None, pad_edge=False)
    for column in ("node", *(("role", "machine") if machines else ()), "state", *_LOAD):
        table.add_column(column, no_wrap=True, overflow="fold")
    lines = sorted(lines, key=lambda line: (line.role, line.node_id))
    for line in lines:
        where = (line.role, escape(line.host or "-")) if machines else ()
        table.add_row(escape(line.node_id), *where, line.state, *line.load())
    console.print(table)
    for line in lines:
        for tier in line.tiers:
            console.print(escape(format_tier(line.node_id, tier)), highlight=False)
    for line in lines:
        show_notes(line.node_id, line.notes(), console)


def show_notes(name: str, notes: Iterable[str], console: Console) -> None:
    for note in notes:
        console.print(f"[yellow]![/] {escape(name)}: {escape(note)}", highlight=False, soft_wrap=True)
