"""Shows a step of a scheduler trace on the terminal: the line, the blocks, what was scheduled, and why not more."""

from __future__ import annotations

from datetime import datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tandem.cluster.describe import counted
from tandem.cluster.replay.reading import TracedStep
from tandem.node.step_trace.records import TracedRequest

_BAR = 40
_MOST_WAITING = 12


def one_line(step: TracedStep) -> str:
    decision, snapshot = step.decision, step.snapshot
    parts = [
        f"step {snapshot.step}",
        _moment(step),
        f"{decision.total_num_scheduled_tokens} tokens of {counted(len(decision.num_scheduled_tokens), 'request')}",
        f"{snapshot.num_waiting + snapshot.num_blocked} wait",
        f"{snapshot.free_blocks} blocks free",
    ]
    for count, what in (
        (len(decision.new), "admitted"),
        (len(decision.resumed), "resumed"),
        (len(decision.loads), "fetching KV"),
        (len(decision.preempted), "preempted"),
        (len(decision.finished), "ended"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return "  ".join(parts)


def show_step(console: Console, step: TracedStep, place: int, of: int) -> None:
    snapshot, decision = step.snapshot, step.decision
    node = f"{step.header.node_id}  " if step.header is not None else ""
    console.print(
        f"[bold]{escape(node)}step {snapshot.step}[/]  {_moment(step)}  ({place + 1} of {of})", highlight=False
    )
    if step.lost:
        console.print(f"[yellow]![/] {step.lost} records before it are missing: the disk was too slow", highlight=False)
    console.print(_blocks(step), highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("request", "is", "computed", "blocks", "gets", ""):
        table.add_column(
            name, no_wrap=name != "", justify="right" if name in ("computed", "blocks", "gets") else "left"
        )
    notes = _notes(step)
    shown = [*snapshot.running, *snapshot.blocked, *snapshot.waiting]
    waiting = 0
    for request in shown:
        acts = request.request_id in decision.num_scheduled_tokens or request.request_id in notes
        if not acts and request not in snapshot.running:
            waiting += 1
            if waiting > _MOST_WAITING:
                continue
        table.add_row(
            *_row(request, decision.num_scheduled_tokens.get(request.request_id, 0), notes.get(request.request_id, ""))
        )
    console.print(table)
    total = snapshot.num_running + snapshot.num_blocked + snapshot.num_waiting
    hidden = total - len(shown) + max(waiting - _MOST_WAITING, 0)
    if hidden:
        console.print(f"[dim]and {counted(hidden, 'request')} more that wait[/]", highlight=False)
    for request_id in decision.finished:
        console.print(f"[dim]{escape(request_id)} has ended since the step before[/]", highlight=False)
    for request_id, blocks in snapshot.held.items():
        console.print(
            f"[dim]{escape(request_id)} has ended, and its {counted(blocks, 'block')} wait for its transfer[/]",
            highlight=False,
        )
    if decision.held_back:
        console.print(f"[yellow]next in line[/] {escape(decision.held_back)}: {escape(decision.why)}", highlight=False)
    console.print(
        f"{decision.total_num_scheduled_tokens} tokens scheduled, {decision.token_budget} left "
        f"({max(decision.prompt_budget, 0)} for prompts)",
        highlight=False,
    )


def _moment(step: TracedStep) -> str:
    header = step.header
    if header is None:
        return f"{step.snapshot.at:.3f} s"
    at = datetime.fromtimestamp(header.unix_time + step.snapshot.at - header.clock)
    return at.strftime("%H:%M:%S.") + f"{at.microsecond // 1000:03d}"


def _blocks(step: TracedStep) -> Text:
    snapshot, decision = step.snapshot, step.decision
    used = snapshot.total_blocks - snapshot.free_blocks
    held = sum(snapshot.held.values())
    full = round(_BAR * used / max(snapshot.total_blocks, 1))
    text = Text("blocks ")
    text.append("█" * full, style="blue")
    text.append("░" * (_BAR - full), style="dim")
    parts = [f" {used} of {snapshot.total_blocks} used", f"{snapshot.cached_blocks} cached"]
    if held:
        parts.append(f"{held} held")
    if snapshot.pinned:
        parts.append(f"{sum(snapshot.pinned.values())} pinned")
    if snapshot.quarantined_blocks:
        parts.append(f"{snapshot.quarantined_blocks} quarantined")
    change = decision.free_blocks - snapshot.free_blocks
    if change:
        parts.append(f"{'+' if change > 0 else '−'}{abs(change)} free in this step")
    return text.append(", ".join(parts))


def _row(request: TracedRequest, tokens: int, note: str) -> tuple[str, ...]:
    gets = f"+{tokens}" if tokens else ""
    state = request.status.replace("_", " ")
    if request.preemptions:
        state += f" (preempted {request.preemptions}×)"
    return (escape(request.request_id), state, f"{request.computed}/{request.tokens}", str(request.blocks), gets, note)


def _notes(step: TracedStep) -> dict[str, str]:
    """Returns what happened to each request in this step, besides being computed."""
    decision, notes = step.decision, {}
    found = {prefix.request_id: prefix for prefix in step.prefixes}
    for request_ids, what in (
        (decision.new, "admitted"),
        (decision.resumed, "resumed"),
        (decision.loads, "fetches KV"),
    ):
        for request_id in request_ids:
            notes[request_id] = what
            prefix = found.get(request_id)
            if prefix is not None:
                notes[request_id] += f": {prefix.local_tokens} of {prefix.tokens} tokens found here"
                if prefix.external_tokens:
                    later = "arrive later" if prefix.arrives_later else "come"
                    notes[request_id] += f", {prefix.external_tokens} {later} by {prefix.connector}"
    for request_id, count in decision.drafts.items():
        notes[request_id] = f"{counted(count, 'draft')} to check"
    for eviction in decision.preempted:
        if not eviction.for_request:
            why = "its KV turned out wrong"
        elif eviction.for_request == eviction.request_id:
            why = "its own next tokens found no block"
        else:
            why = f"for the next tokens of {escape(eviction.for_request)}"
        notes[eviction.request_id] = (
            f"[red]preempted[/] {why}: {counted(eviction.blocks, 'block')} given up, "
            f"{counted(eviction.computed, 'token')} to compute again"
        )
    return notes
