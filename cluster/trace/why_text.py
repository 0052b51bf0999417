"""Shows an explanation in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tandem.cluster.trace.why import Explanation, OtherClusters, Reason

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
    if why.would_have_been is not None:
        _show_others(console, why.would_have_been)
    for remark in why.remarks:
        console.print(f"[yellow]![/] {escape(remark)}", highlight=False, soft_wrap=True)


def _show_others(console: Console, would: OtherClusters) -> None:
    console.print(
        f"would have been, by a simulation of {would.requests} requests around it (its first tokens are "
        f"{would.first_token_error:.0%} off in the median, whole answers {would.total_error:.0%}; this request as it is: "
        f"{_ms(would.first_token_s)} and {_ms(would.total_s)}):",
        highlight=False,
        soft_wrap=True,
    )
    for other in would.others:
        first = _change(other.first_token_s, would.first_token_error * would.first_token_s)
        total = _change(other.total_s, would.total_error * would.total_s)
        console.print(
            f"  {escape(other.what)}: {first} to the first token, {total} to the last", highlight=False, soft_wrap=True
        )


def _change(seconds: float, error_s: float) -> str:
    sign = "−" if seconds < 0 else "+"
    return f"{sign}{_ms(abs(seconds))}" + (" (less than the error)" if abs(seconds) < error_s else "")


def _table(title: str, reasons: Sequence[Reason], total_s: float) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_header=False)
    table.add_column(justify="right", no_wrap=True, min_width=len(_ms(total_s)))
    table.add_column(no_wrap=True, width=_BAR)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for reason in reasons:
        share = reason.seconds / total_s if total_s else 0.0
        bar = Text("█" * max(1, round(share * _BAR)), style="blue")
        where = f" [dim]({escape(reason.where)})[/]" if reason.where else ""
        table.add_row(_ms(reason.seconds), bar, f"{escape(reason.what)}{where}", Text(reason.detail, style="dim"))
    table.add_row(Text(_ms(sum(reason.seconds for reason in reasons)), style="bold"), "", "together", "")
    return table


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"
