"""`tandem top`: shows the cluster as it is now, repeatedly, and the slowest requests of the last ten minutes by cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tandem.base.errors import ConfigurationError
from tandem.cluster.api_client import ApiClient
from tandem.cluster.commands.node_table import Column, node_table
from tandem.cluster.commands.output import print_json
from tandem.cluster.describe import counted
from tandem.router.page_state import NodeRow, PageState
from tandem.router.tracer import SHORT_ID
from tandem.wire.nodes import Role

_MOST_NODES = 24
_LEAST_PERIOD_S, _MOST_PERIOD_S = 0.2, 3600.0


def run(
    client: ApiClient,
    console: Console,
    every_s: float,
    *,
    once: bool,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Returns 1 if a request could not be answered now."""
    if not _LEAST_PERIOD_S <= every_s <= _MOST_PERIOD_S:
        raise ConfigurationError(
            f"--every must be seconds from {_LEAST_PERIOD_S:g} to {_MOST_PERIOD_S:g}, not {every_s:g}"
        )
    state = client.read("/ui/state", PageState)
    if as_json:
        print_json(state)
    elif once or not console.is_terminal:
        console.print(screen(state, None))
    else:
        _watch(client, console, state, every_s, sleep)
    return 1 if state.router.unhealthy else 0


def _watch(
    client: ApiClient, console: Console, state: PageState, every_s: float, sleep: Callable[[float], None]
) -> None:
    try:
        with Live(screen(state, None), console=console, screen=True, auto_refresh=False) as live:
            while True:
                sleep(every_s)
                before, state = state, client.read("/ui/state", PageState)
                live.update(screen(state, before), refresh=True)
    except KeyboardInterrupt:
        return


def screen(state: PageState, before: PageState | None) -> RenderableType:
    return Group(_head(state), _past(state), *_wrong(state), _nodes(state, before), *_slowest(state))


def _head(state: PageState) -> Text:
    router = state.router
    text = Text(f"{router.model}  ", style="bold")
    text.append(
        f"unavailable: {router.unhealthy}" if router.unhealthy else "serving",
        style="red" if router.unhealthy else "green",
    )
    text.append(f"  {router.running} of {router.places} places taken, {router.queued} in line", style="default")
    if router.queued:
        text.append(f" (the first for {router.oldest_wait_s:.1f} s)")
    if silent := [one.name for one in router.processes if not one.answers]:
        text.append(f", no answer from {', '.join(silent)}", style="yellow")
    moving = sum(pair.transfers for pair in state.moving)
    return text.append(f", {counted(moving, 'transfer')} under way")


def _past(state: PageState) -> Text:
    ended = sum(moment.ended for moment in state.moments)
    counted_ones = ended - sum(moment.failed for moment in state.moments)
    if not counted_ones:
        return Text("no request has ended in the last ten minutes", style="dim")
    first = sum(moment.first_in_time for moment in state.moments) / counted_ones
    tokens = sum(moment.tokens_in_time for moment in state.moments) / counted_ones
    return Text(
        f"last ten minutes: {counted(ended, 'request')}, first token within {state.ttft_s:g} s for {first:.1%}, "
        f"tokens within {state.inter_token_s * 1e3:g} ms for {tokens:.1%}"
    )


def _wrong(state: PageState) -> list[Text]:
    """Returns what went wrong in the last ten minutes, and what is wrong now with nodes that serve."""
    counts = (
        (sum(getattr(moment, field) for moment in state.moments), name)
        for field, name in (
            ("errors", "failed"),
            ("refused", "refused"),
            ("moved", "moved to another node"),
            ("restarts", "restarts of nodes"),
        )
    )
    said = ", ".join(f"{count} {name}" for count, name in counts if count)
    lines = [Text(said, style="red")] if said else []
    return lines + [Text(f"! {node.node_id}: {note}", style="yellow") for node in state.nodes for note in node.notes]


def _nodes(state: PageState, before: PageState | None) -> Table:
    old = {node.node_id: node for node in before.nodes} if before is not None else {}
    seconds = state.now - before.now if before is not None else 0.0

    def rate(name: str, field: str) -> Column:
        def shown(node: NodeRow) -> str:
            if node.node_id not in old or seconds <= 0:
                return ""
            grown: int = getattr(node, field) - getattr(old[node.node_id], field)
            return f"{max(grown, 0) / seconds:.0f}"

        return name, shown

    busiest = sorted(state.nodes, key=lambda node: (not node.why, -node.running - node.waiting, node.node_id))
    rates = rate("prompt/s", "prompt_tokens"), rate("output/s", "output_tokens")
    table = node_table(busiest[:_MOST_NODES], after=rates)
    if len(busiest) > _MOST_NODES:
        table.add_row(f"[dim]and {len(busiest) - _MOST_NODES} more[/]")
    return table


def _slowest(state: PageState) -> list[RenderableType]:
    if not state.slowest:
        return []
    causes = Counter(slow.cause for slow in state.slowest)
    table = Table(box=None, pad_edge=False)
    ids = {slow.account.request_id for slow in state.slowest}
    length = _short_id(ids)
    # Ids are copied and figures compared, so in a narrow terminal only words are folded.
    table.add_column("slowest", no_wrap=True, min_width=max(len(one[:length]) for one in ids))
    table.add_column("cause", overflow="fold")
    for name in ("of slo", "first token", "per token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("nodes", no_wrap=True)
    for slow in state.slowest:
        account = slow.account
        table.add_row(
            escape(account.request_id[:length]),
            slow.cause,
            f"{slow.excess:.1f}×",
            f"{account.first_token_s * 1e3:.0f} ms",
            f"{account.token_s * 1e3:.1f} ms",
            "→".join(_short(node) for node in (account.prefill_node, account.decode_node) if node),
        )
    summary = ", ".join(f"{cause} {count}×" for cause, count in causes.most_common())
    worst = causes.most_common(1)[0][0]
    advice = next((slow.advice for slow in state.slowest if slow.cause == worst and slow.excess > 1), "")
    lines = [f"by cause: {summary}. {advice}".rstrip(), "`tandem why ID` tells one to the millisecond"]
    return [table, Text("\n".join(lines), style="dim")]


def _short_id(ids: set[str]) -> int:
    """Returns how many characters tell these ids apart, at least as many as `tandem why` finds one by."""
    longest = max(map(len, ids))
    return next((n for n in range(SHORT_ID, longest) if len({one[:n] for one in ids}) == len(ids)), longest)


def _short(node: str) -> str:
    """prefill-12 is p12; another name stays as it is."""
    role, _, number = node.rpartition("-")
    return f"{role[0]}{number}" if role in tuple(Role) and number.isdigit() else node
