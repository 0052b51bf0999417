"""An explanation on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tandem.cluster.trace.why import Explanation, Reason

_BAR = 24


def show_explanation(console: Console, why: Explanation) -> None:
    first = f", first token after {_ms(why.first_token_s)}" if why.first_token_s is not None else ""
    console.print(f"[bold]{escape(why.request_id)}[/]: {_ms(why.total_s)}{first}", highlight=False)
    console.print(f"most of it: [bold]{escape(why.cause)}[/]", highlight=False)
    console.print(_table("to the first token", why.to_first_token, why.total_s))
    if why.after:
        console.print(_table("after it", why.after, why.total_s))
    for decision in why.decisions:
        console.print(f"decided: {escape(decision)}", highlight=False, soft_wrap=True)
    for alternative in why.alternatives:
        console.print(f"  {escape(alternative)}", highlight=False, soft_wrap=True)
    for remark in why.remarks:
        console.print(f"[yellow]![/] {escape(remark)}", highlight=False, soft_wrap=True)


def _table(title: str, reasons: Sequence[Reason], total_s: float) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, width=_BAR)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for reason in reasons:
        share = reason.seconds / total_s if total_s else 0.0
        bar = Text("█" * max(1, round(share * _BAR)), style="blue")
        where = f" [dim]({escape(reason.where)})[/]" if reason.where else ""
        table.add_row(
            _ms(reason.seconds), bar, f"{escape(reason.what)}{where}", Text(reason.detail, style="dim")
        )
    table.add_row(Text(_ms(sum(reason.seconds for reason in reasons)), style="bold"), "", "together", "")
    return table


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"
