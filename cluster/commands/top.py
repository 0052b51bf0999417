"""`tandem top`: shows the cluster as it is now, repeatedly, and the slowest requests of the last ten minutes by cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tandem.cluster.api_client import ApiClient
from tandem.cluster.commands.output import print_json
from tandem.cluster.describe import counted, format_blocks
from tandem.router.page_state import NodeRow, PageState
from tandem.wire.errors import ConfigurationError, InternalError

_MOST_NODES = 24
_LEAST_PERIOD_S = 0.2


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
    if every_s < _LEAST_PERIOD_S:
        raise ConfigurationError(f"--every must be {_LEAST_PERIOD_S:g} seconds or more, not {every_s:g}")
    state = fetch(client)
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
                before, state = state, fetch(client)
                live.update(screen(state, before), refresh=True)
    except KeyboardInterrupt:
        return


def fetch(client: ApiClient) -> PageState:
    response = client.get("/ui/state")
    try:
        return msgspec.json.decode(response.content, type=PageState)
    except msgspec.MsgspecError as error:
        raise InternalError(f"{client.url}/ui/state did not answer like a Tandem router: {error}") from error


def screen(state: PageState, before: PageState | None) -> RenderableType:
    return Group(_head(state), _past(state), _nodes(state, before), *_slowest(state))


def _head(state: PageState) -> Text:
    router = state.router
    text = Text(f"{router.model}  ", style="bold")
    text.append(
        f"unavailable: {router.unhealthy}" if router.unhealthy else "serving",
        style="red" if router.unhealthy else "green",
    )
    text.append(
        f"  {router.running} of {router.places} places taken, {router.queued} in line", style="default"
    )
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


def _nodes(state: PageState, before: PageState | None) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("node", "state", "runs", "waits", "blocks free", "moving", "prompt/s", "output/s"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("node", "state") else "right")
    old = {node.node_id: node for node in before.nodes} if before is not None else {}
    seconds = state.now - before.now if before is not None else 0.0
    busiest = sorted(state.nodes, key=lambda node: (not node.why, -node.running - node.waiting, node.node_id))
    for node in busiest[:_MOST_NODES]:
        table.add_row(
            escape(node.node_id),
            f"[red]{escape(node.state)}[/]" if node.why else node.state,
            str(node.running),
            str(node.waiting),
            format_blocks(node.total_blocks - node.used_blocks, node.total_blocks),
            str(node.transfers),
            *_rates(node, old.get(node.node_id), seconds),
        )
    if len(busiest) > _MOST_NODES:
        table.add_row(f"[dim]and {len(busiest) - _MOST_NODES} more[/]")
    return table


def _rates(node: NodeRow, before: NodeRow | None, seconds: float) -> tuple[str, str]:
    if before is None or seconds <= 0:
        return ("", "")
    prompt, output = node.prompt_tokens - before.prompt_tokens, node.output_tokens - before.output_tokens
    return (f"{max(prompt, 0) / seconds:.0f}", f"{max(output, 0) / seconds:.0f}")


def _slowest(state: PageState) -> list[RenderableType]:
    if not state.slowest:
        return []
    causes = Counter(slow.cause for slow in state.slowest)
    table = Table(box=None, pad_edge=False)
    # Ids are copied and figures compared, so in a narrow terminal only words are folded.
    longest = max(len(slow.account.request_id) for slow in state.slowest)
    table.add_column("slowest requests", no_wrap=True, min_width=longest)
    table.add_column("cause", overflow="fold")
    for name in ("of slo", "first token", "per token"):
        table.add_column(name, justify="right", min_width=len("10000 ms"))
    table.add_column("nodes", overflow="fold")
    for slow in state.slowest:
        account = slow.account
        table.add_row(
            escape(account.request_id),
            slow.cause,
            f"{slow.excess:.1f}×",
            f"{account.first_token_s * 1e3:.0f} ms",
            f"{account.token_s * 1e3:.1f} ms",
            " → ".join(filter(None, (account.prefill_node, account.decode_node))),
        )
    summary = ", ".join(f"{cause} {count}×" for cause, count in causes.most_common())
    return [table, Text(f"by cause: {summary}. `tandem why ID` tells one to the millisecond", style="dim")]
