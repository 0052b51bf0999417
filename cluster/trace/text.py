"""Shows a trace in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.cluster.describe import format_size
from tandem.cluster.trace.account import AccountRow, end_of, first_token_s, handover, rows, sent_whole_s
from tandem.cluster.trace.phases import PHASES
from tandem.router.tracing.record import TraceList, TraceRecord
from tandem.wire.tracing import TracePhase, TransferRecord

_BAR = 40


def show_trace(console: Console, record: TraceRecord) -> None:
    console.print(Group(*_head(record), _timeline(record), *_handover(record), *_transfers(record), *_remarks(record)))


def _head(record: TraceRecord) -> list[RenderableType]:
    first, whole = first_token_s(record), sent_whole_s(record)
    took = f"{_ms(record.ended - record.began)} ms" if record.ended is not None else "still running"
    parts = [
        f"{record.prompt_tokens} tokens in, {record.output_tokens} out",
        took,
        *([f"first token after {_ms(first)} ms"] if first is not None else []),
        *([f"sent whole after {_ms(whole)} ms"] if whole is not None else []),
        *([f"status {record.status}"] if record.status not in (None, 200) else []),
    ]
    return [
        Text(f"{record.answer_id or record.request_id}: {', '.join(parts)}", style="bold"),
        Text(f"trace {record.trace_id}; {'; '.join(record.decisions) or 'no node was chosen'}", style="dim"),
    ]


def _timeline(record: TraceRecord) -> Table:
    length = max(end_of(record) - record.began, 1e-9)
    table = Table(box=None, pad_edge=False)
    for name in ("on", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("from ms", "took ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"0 … {_ms(length)} ms", no_wrap=True, width=_BAR)
    table.add_column("", overflow="fold")
    for row in rows(record):
        name = row.phase.value if row.count == 1 else f"{row.phase.value} ×{row.count}"
        bar = Text(_bar(row, record.began, length), style=PHASES[row.phase].style)
        table.add_row(row.party, name, _ms(row.start - record.began), _ms(row.end - row.start), bar, _detail(row))
    return table


def _bar(row: AccountRow, began: float, length: float) -> str:
    first = min(_BAR - 1, max(0, int((row.start - began) / length * _BAR)))
    last = min(_BAR, max(first + 1, round((row.end - began) / length * _BAR)))
    mark = "█" if row.end - row.start >= length / _BAR / 2 else "▏"
    return " " * first + mark * (last - first)


def _detail(row: AccountRow) -> str:
    parts = []
    if row.count > 1:
        parts.append(f"{_ms(row.typical_s)} ms each, at most {_ms(row.longest_s)}")
        if row.phase is TracePhase.DECODE:
            parts.append(f"{_ms(row.between_s)} between")
    elif row.tokens:
        parts.append(f"{row.tokens} tokens")
    if row.num_bytes:
        parts.append(format_size(row.num_bytes))
    return ", ".join(parts)


def _handover(record: TraceRecord) -> list[RenderableType]:
    items = handover(record)
    if not items:
        return []
    title = "handover: prompt computed → first decoding step"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for item in items:
        table.add_row(f"{_ms(item.seconds)} ms", item.name)
    table.add_row(Text(f"{_ms(sum(item.seconds for item in items))} ms", style="bold"), "together")
    return [table]


def _transfers(record: TraceRecord) -> list[Text]:
    return [
        Text(f"{part.node_id}'s KV transfer: {_transfer(part.transfer)}")
        for part in record.nodes
        if part.transfer is not None
    ]


def _transfer(transfer: TransferRecord) -> str:
    parts = [transfer.outcome.replace("_", " ")]
    if transfer.num_bytes:
        parts.append(f"{format_size(transfer.num_bytes)} in {transfer.blocks} blocks")
    if transfer.descriptors:
        overlapped = transfer.bytes_overlapped / max(transfer.num_bytes, 1)
        parts.append(f"{transfer.descriptors} descriptors")
        parts.append(f"{overlapped:.0%} while the prompt was computed")
    parts += [f"{stage.replace('_', ' ')} {_ms(seconds)} ms" for stage, seconds in transfer.waits.items()]
    return ", ".join(parts)


def _remarks(record: TraceRecord) -> list[Text]:
    remarks = [Text(f"! {node_id} has not reported its part", style="yellow") for node_id in record.missing]
    for part in record.nodes:
        if part.clock_error_s is None:
            remarks.append(Text(f"! {part.node_id}'s clock is not known: its times may be off", style="yellow"))
        elif part.clock_error_s:
            remarks.append(
                Text(f"{part.node_id}'s times are right to within {_ms(part.clock_error_s)} ms", style="dim")
            )
    dropped = record.dropped + sum(part.dropped for part in record.nodes)
    if dropped:
        remarks.append(Text(f"! {dropped} spans did not fit", style="yellow"))
    return remarks


def show_list(console: Console, traces: TraceList) -> None:
    if not traces.traces:
        console.print(
            "No traces. A request is traced when it has the header x-tandem-trace: 1 or a sampled traceparent,\n"
            "or by chance with router.tracing.sample.",
            highlight=False,
        )
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("at", no_wrap=True, min_width=len("00:00:00"))
    longest = max((len(one.request_id) for one in traces.traces), default=0)
    table.add_column("request", no_wrap=True, min_width=longest)
    for name in ("answer", "route"):
        table.add_column(name, overflow="fold")
    for name in ("status", "in", "out", "ms"):
        table.add_column(name, justify="right")
    for one in traces.traces:
        at = datetime.fromtimestamp(one.began_unix_s, UTC).strftime("%H:%M:%S")
        table.add_row(
            at,
            one.request_id,
            one.answer_id,
            one.route,
            str(one.status or ""),
            str(one.prompt_tokens),
            str(one.output_tokens),
            _ms(one.seconds) if one.seconds is not None else "running",
        )
    console.print(table)


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
