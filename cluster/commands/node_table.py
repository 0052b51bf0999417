"""The nodes in `tandem status` and `tandem top`, whether a controller or a router was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.router.page_state import NodeRow

Column = tuple[str, Callable[[NodeRow], str]]  # its heading, and what it shows of a node


def format_blocks(free: int, total: int, quarantined: int = 0, pinned: int = 0) -> str:
    """Shows free and total blocks. Quarantined blocks are not free, because a peer may still write to them; pinned ones are not free
    until their pin ends."""
    counts = ((quarantined, "quarantined"), (pinned, "pinned"))
    notes = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{free}/{total}" + (f" ({notes})" if notes else "")


def _blocks(row: NodeRow) -> str:
    free = row.total_blocks - row.used_blocks
    return format_blocks(free, row.total_blocks, row.quarantined_blocks, row.pinned_blocks)


_WIDEST = 1000

_LOAD: Sequence[Column] = (
    ("run", lambda row: str(row.running)),
    ("wait", lambda row: str(row.waiting)),
    ("blocks free", _blocks),
    ("moving", lambda row: str(row.transfers)),
)


def node_table(rows: Iterable[NodeRow], before: Sequence[Column] = (), after: Sequence[Column] = ()) -> Table:
    """`before`: columns between the name and the state. `after`: columns of figures, behind those of each node's load."""
    table, load = Table(box=None, pad_edge=False), (*_LOAD, *after)
    for name in ("node", *(name for name, _ in before), "state"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for name, _ in load:
        table.add_column(name, no_wrap=True, overflow="fold", justify="right")
    for row in rows:
        table.add_row(
            escape(row.node_id),
            *(escape(show(row)) for _, show in before),
            f"[red]{escape(row.state)}[/]" if row.why else row.state,
            *("-" if row.is_silent else show(row) for _, show in load),
        )
    table.width = Console(width=_WIDEST).measure(table).maximum  # rich would cut names and figures to fit a terminal
    return table


def show_notes(name: str, notes: Iterable[str], console: Console) -> None:
    for note in notes:
        console.print(f"[yellow]![/] {escape(name)}: {escape(note)}", highlight=False, soft_wrap=True)
