"""Computes what a trace adds up to. Pure: records in, figures out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.wire.tracing import Span, TracePhase

ROUTER = "router"


class AccountRow(msgspec.Struct, frozen=True):
    """Something that took time in the router or on a node. Consecutive steps are one row, with their `count`."""

    party: str
    phase: TracePhase
    start: float
    end: float
    count: int = 1
    tokens: int = 0
    num_bytes: int = 0
    typical_s: float = 0.0  # the median of the steps
    longest_s: float = 0.0
    between_s: float = 0.0  # the median from one step to the next


class AccountItem(msgspec.Struct, frozen=True):
    name: str
    seconds: float


def end_of(record: TraceRecord) -> float:
    """Returns the end of the last span, or of the record if that is later."""
    spans = [*record.router, *(span for part in record.nodes for span in part.spans)]
    return max([record.ended or record.began, *(span.end for span in spans)])


def rows(record: TraceRecord) -> list[AccountRow]:
    """Returns the rows in the order in which they began. Steps are left out: their forward passes are shown, and what a step did besides lies
    between two of those."""
    found = _folded(ROUTER, record.router, frozenset({TracePhase.FLUSH}))
    for part in record.nodes:
        shown = [span for span in part.spans if span.phase is not TracePhase.STEP]
        found += _folded(part.node_id, shown, frozenset({TracePhase.DECODE}))
    return sorted(found, key=lambda row: (row.start, row.end))


def _folded(party: str, spans: Iterable[Span], folded: frozenset[TracePhase]) -> list[AccountRow]:
    runs: dict[object, list[Span]] = {}
    for span in spans:
        runs.setdefault(span.phase if span.phase in folded else id(span), []).append(span)
    return [_run(party, run) for run in runs.values()]


def _run(party: str, run: Sequence[Span]) -> AccountRow:
    return AccountRow(
        party,
        run[0].phase,
        min(span.start for span in run),
        max(span.end for span in run),
        len(run),
        sum(span.tokens for span in run),
        sum(span.num_bytes for span in run),
        median(span.seconds for span in run),
        max(span.seconds for span in run),
        _between(run),
    )


def _between(run: Sequence[Span]) -> float:
    gaps = [later.start - earlier.end for earlier, later in pairwise(sorted(run, key=lambda s: s.start))]
    return median(gaps) if gaps else 0.0


def first_token_s(record: TraceRecord) -> float | None:
    """Returns the time from the request's arrival until the router had its first token, as the metrics, the page and `tandem top` count
    it. An answer that is sent whole has left long after it."""
    return min(arrival.at for arrival in record.arrivals) - record.began if record.arrivals else None


def sent_whole_s(record: TraceRecord) -> float | None:
    """Returns the time until an answer of several tokens was sent in one piece, and None for one that was streamed."""
    flushes = [span for span in record.router if span.phase is TracePhase.FLUSH]
    return flushes[0].end - record.began if len(flushes) == 1 and len(record.arrivals) > 1 else None


def handover(record: TraceRecord) -> list[AccountItem]:
    """Returns the parts of the time from the prompt's last forward pass to the first decoding one. They add up to it."""
    reader, writer = _reader(record), _writer(record)
    if reader is None or writer is None or reader is writer:
        return []
    prefills = [s.end for s in reader.spans if s.phase is TracePhase.PREFILL]
    decodes = [s.start for s in writer.spans if s.phase is TracePhase.DECODE]
    received = _of(writer.spans, TracePhase.RECEIVE)
    if not prefills or not decodes or received is None:
        return []
    computed, goes_on = max(prefills), min(decodes)
    writes = [s.end for s in reader.spans if s.phase is TracePhase.WRITE]
    written = min(max([computed, *writes]), received.end)
    return [
        AccountItem("KV that was left to send", max(0.0, written - computed)),
        AccountItem("notice", max(0.0, received.end - written)),
        AccountItem("until the first decoding step", max(0.0, goes_on - max(received.end, computed))),
    ]


def _reader(record: TraceRecord) -> NodePart | None:
    """Returns the first part that computed the prompt."""
    return next((p for p in record.nodes if _of(p.spans, TracePhase.PREFILL) is not None), None)


def _writer(record: TraceRecord) -> NodePart | None:
    return next((p for p in record.nodes if _of(p.spans, TracePhase.DECODE) is not None), None)


def _of(spans: Iterable[Span], phase: TracePhase) -> Span | None:
    return next((span for span in spans if span.phase is phase), None)
