"""Draws a trace: one lane for each phase in the router and on each node, with time from left to right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.cluster.saving import new_figure
from tandem.cluster.trace.account import ROUTER, end_of, first_token_s
from tandem.cluster.trace.phases import PHASES
from tandem.router.tracing.record import TraceRecord
from tandem.wire.tracing import Span, TracePhase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# If the whole is this many times as long as the beginning, the beginning gets a panel of its own: it would be a line at the left edge.
_LONG = 4.0


def draw_trace(record: TraceRecord) -> Figure:
    lanes = _lanes(record)
    whole = end_of(record) - record.began
    beginning = _beginning(record)
    split = beginning is not None and whole > _LONG * beginning
    figure = new_figure(13, (0.32 * len(lanes) + 1.2) * (2 if split else 1) + 0.6)
    figure.suptitle(
        f"{record.answer_id or record.request_id}: {record.prompt_tokens} tokens in, {record.output_tokens} out"
    )
    if split and beginning is not None:
        upper, lower = figure.subplots(2, 1)
        _draw(upper, record, lanes, beginning)
        upper.set_title("until it decodes", fontsize=9, loc="left")
        _draw(lower, record, lanes, whole)
        lower.set_title("all of it", fontsize=9, loc="left")
    else:
        _draw(figure.subplots(1, 1), record, lanes, whole)
    return figure


def _lanes(record: TraceRecord) -> list[tuple[str, TracePhase, list[Span]]]:
    parties = [(ROUTER, record.router), *((part.node_id, part.spans) for part in record.nodes)]
    lanes: list[tuple[str, TracePhase, list[Span]]] = []
    for party, spans in parties:
        by_phase: dict[TracePhase, list[Span]] = {}
        for span in sorted(spans, key=lambda span: span.start):
            by_phase.setdefault(span.phase, []).append(span)
        lanes += [(party, phase, found) for phase, found in by_phase.items()]
    return lanes


def _beginning(record: TraceRecord) -> float | None:
    """Returns the time until the third decoding step: by then everything that happens once has happened."""
    decodes = sorted(span.end for part in record.nodes for span in part.spans if span.phase is TracePhase.DECODE)
    return decodes[min(2, len(decodes) - 1)] - record.began if decodes else None


def _draw(axes: Axes, record: TraceRecord, lanes: list[tuple[str, TracePhase, list[Span]]], length: float) -> None:
    for lane, (_, phase, spans) in enumerate(lanes):
        bars = [
            ((span.start - record.began) * 1e3, max(span.seconds, length / 2000) * 1e3)
            for span in spans
            if span.start - record.began <= length
        ]
        axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=PHASES[phase].color, edgecolor="white", linewidth=0.3)
    first = first_token_s(record)
    if first is not None and first <= length:
        axes.axvline(first * 1e3, color="black", linewidth=0.8, linestyle="--")
        axes.annotate("first token", (first * 1e3, -0.7), fontsize=7, ha="left", annotation_clip=False)
    axes.set_yticks(range(len(lanes)), [f"{party}  {phase.value}" for party, phase, _ in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, length * 1e3)
    axes.set_xlabel("ms since the request arrived", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
