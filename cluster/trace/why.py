"""`tandem why`: attributes every millisecond of one request to what the request waited for.

At each moment several processes may work on a request: its decode node waits for KV while its prefill node computes. The moment is attributed
to the work on which the others depend, so that the parts add up to the whole. Pure: records in, parts out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median

import msgspec

from tandem.cluster.trace.account import end_of
from tandem.cluster.trace.phases import PHASES
from tandem.router.policy.choose import Alternative
from tandem.router.recent import RequestAccount, Targets, cause_of, parts_of
from tandem.router.tracing.record import NodePart, TraceRecord
from tandem.wire.tracing import Span, TracePhase

BETWEEN = "on the way between processes"

_RANKS = {phase: rank for rank, phase in enumerate(PHASES)}


class Reason(msgspec.Struct, frozen=True):
    """A part of a request's time."""

    where: str  # the router, or a node
    what: str
    seconds: float
    times: int = 1
    detail: str = ""


class OtherCluster(msgspec.Struct, frozen=True):
    """By how much the request's times would differ in that cluster, from a simulation of the cluster as it was."""

    what: str
    first_token_s: float
    total_s: float


class OtherClusters(msgspec.Struct, frozen=True):
    requests: int  # that were simulated
    first_token_s: float  # of this request, simulated in the cluster as it was
    total_s: float
    # The simulation's median error over all requests, as a share of what was measured
    first_token_error: float
    total_error: float
    others: list[OtherCluster]


class Explanation(msgspec.Struct, frozen=True):
    request_id: str
    total_s: float
    first_token_s: float | None
    to_first_token: list[Reason]  # they add up to `first_token_s`
    after: list[Reason]  # they add up to the rest
    cause: str
    decisions: list[str]
    alternatives: list[str]
    remarks: list[str]
    traced: bool
    would_have_been: OtherClusters | None = None  # None: not asked for, or it cannot be simulated


def explain(record: TraceRecord) -> Explanation:
    ended = record.ended if record.ended is not None else end_of(record)
    first = min((arrival.at for arrival in record.arrivals), default=None)
    turn = min(first, ended) if first is not None else ended
    before = _reasons(record, record.began, turn)
    after = _reasons(record, turn, ended)
    return Explanation(
        request_id=record.request_id,
        total_s=ended - record.began,
        first_token_s=turn - record.began if first is not None else None,
        to_first_token=before,
        after=after,
        cause=_longest([*before, *after]),
        decisions=record.decisions,
        alternatives=[_alternative(one) for one in record.alternatives],
        remarks=list(_remarks(record)),
        traced=True,
    )


def explain_account(account: RequestAccount, targets: Targets) -> Explanation:
    """Explains a request that was not traced by the router's own account of it."""
    where = {
        "a node's line": account.prefill_node or account.decode_node,
        "computing the prompt": account.prefill_node or account.decode_node,
    }
    reasons = [
        Reason(where.get(name, account.decode_node if index > 3 else "router"), name, seconds)
        for index, (name, seconds) in enumerate(parts_of(account))
        if seconds > 0
    ]
    count = sum(seconds > 0 for _, seconds in parts_of(account)[:4])
    remarks = []
    if account.preemptions:
        remarks.append(f"it lost its blocks {account.preemptions} times")
    if account.failovers:
        remarks.append(f"it moved to another node {account.failovers} times")
    if account.longest_gap_s:
        remarks.append(f"the longest gap in its answer was {account.longest_gap_s * 1e3:.0f} ms")
    remarks.append(
        "it was not traced: these parts are the router's own view (send x-tandem-trace: 1 to see every step)"
    )
    return Explanation(
        request_id=account.request_id,
        total_s=account.total_s,
        first_token_s=account.first_token_s if account.output_tokens else None,
        to_first_token=reasons[:count],
        after=reasons[count:],
        cause=cause_of(account, targets),
        decisions=[account.decision],
        alternatives=[],
        remarks=remarks,
        traced=False,
    )


def _reasons(record: TraceRecord, start: float, end: float) -> list[Reason]:
    """Returns what took the time from `start` to `end`, in the order of first occurrence."""
    spans = [(rank, where, span) for rank, where, span in _ranked(record) if span.start < end and span.end > start]
    edges = sorted({start, end, *(min(max(at, start), end) for _, _, span in spans for at in (span.start, span.end))})
    shares: dict[tuple[str, str], float] = {}
    used: dict[tuple[str, str], dict[int, Span]] = {}
    live: list[tuple[int, str, Span]] = []
    upcoming = sorted(spans, key=lambda one: one[2].start)
    at = 0
    for left, right in itertools.pairwise(edges):
        while at < len(upcoming) and upcoming[at][2].start <= left:
            live.append(upcoming[at])
            at += 1
        live = [one for one in live if one[2].end > left]
        if live:
            _, where, span = min(live, key=lambda one: one[0])
            key = (where, PHASES[span.phase].what)
            used.setdefault(key, {})[id(span)] = span
        else:
            key = ("", BETWEEN)
        shares[key] = shares.get(key, 0.0) + right - left
    return [
        Reason(
            where,
            what,
            seconds,
            len(used.get((where, what), ())) or 1,
            _detail(list(used.get((where, what), {}).values())),
        )
        for (where, what), seconds in shares.items()
        if seconds > 0
    ]


def _ranked(record: TraceRecord) -> Iterator[tuple[int, str, Span]]:
    for span in record.router:
        yield _RANKS[span.phase], "router", span
    for part in record.nodes:
        # While a decode node waits for KV, its own line delays nothing: the prefill node's work counts.
        receives = any(span.phase is TracePhase.RECEIVE for span in part.spans)
        for span in part.spans:
            later = len(_RANKS) if receives and span.phase in (TracePhase.QUEUE, TracePhase.INBOX) else 0
            yield _RANKS[span.phase] + later, part.node_id, span


def _detail(spans: list[Span]) -> str:
    """Describes the chunks or steps, and how many tokens of other requests shared them."""
    computing = [span for span in spans if span.phase in (TracePhase.PREFILL, TracePhase.DECODE)]
    moved = sum(span.num_bytes for span in spans)
    if moved:
        return f"{moved / 2**20:.1f} MiB in {len(spans)} pieces"
    if not computing:
        return ""
    tokens = sum(span.tokens for span in computing)
    unit = "chunk" if computing[0].phase is TracePhase.PREFILL else "step"
    parts = [f"{tokens} tokens in {len(computing)} {unit}{'s' if len(computing) > 1 else ''}"]
    shared = [span.beside for span in computing if span.beside]
    if shared:
        parts.append(f"{len(shared)} shared with {median(shared):.0f} tokens of other requests")
    slowest = max(computing, key=lambda span: span.seconds)
    if len(computing) > 1:
        parts.append(
            f"the longest {slowest.seconds * 1e3:.1f} ms"
            + (f" beside {slowest.beside} tokens" if slowest.beside else "")
        )
    return ", ".join(parts)


def _longest(reasons: list[Reason]) -> str:
    if not reasons:
        return "nothing"
    longest = max(reasons, key=lambda reason: reason.seconds)
    return f"{longest.what} ({longest.where})" if longest.where else longest.what


def _alternative(one: Alternative) -> str:
    parts = [f"{one.expected_s * 1e3:.0f} ms expected", f"{one.waiting_tokens} prompt tokens before it"]
    if one.cached_tokens:
        parts.append(f"{one.cached_tokens} tokens cached")
    return f"{one.node_id}{' (chosen)' if one.chosen else ''}: {', '.join(parts)}"


def _remarks(record: TraceRecord) -> Iterator[str]:
    preemptions = sum(span.phase is TracePhase.PREEMPTED for part in record.nodes for span in part.spans)
    if preemptions:
        yield f"it lost its blocks {preemptions} times, and was computed again"
    if len(record.decisions) > 1:
        yield f"{len(record.decisions)} decisions: it has several choices, or moved to another node"
    for node_id in record.missing:
        yield f"{node_id} has not reported its part: its time counts as {BETWEEN}"
    for part in record.nodes:
        yield from _transfer_remark(part)
        if part.clock_error_s:
            yield f"{part.node_id}'s times are right to within {part.clock_error_s * 1e3:.2f} ms"


def _transfer_remark(part: NodePart) -> Iterator[str]:
    transfer = part.transfer
    if transfer is not None and transfer.outcome not in ("sent", "received"):
        yield f"its KV's transfer at {part.node_id} ended as {transfer.outcome.replace('_', ' ')}"
