"""`tandem why`: the parts of any trace add up to the whole time."""

from __future__ import annotations

import io
import json

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tandem.base.errors import RequestError
from tandem.cluster.trace.command import TraceClient, explained
from tandem.cluster.trace.why import BETWEEN, explain, explain_account
from tandem.cluster.trace.why_text import show_explanation
from tandem.router.policy.choose import Alternative
from tandem.router.tracing.record import Arrival, NodePart, TraceRecord
from tandem.wire.tracing import Span, TracePhase
from tests.cluster.page_states import state
from tests.router.test_router_recent import QUICK, TARGETS

P = TracePhase


def record(router: list[Span], nodes: list[NodePart], arrivals: list[Arrival], ended: float = 10.0) -> TraceRecord:
    return TraceRecord(
        "r", "cmpl-r", "t", "s", None, "", "/v1/completions", "m", 0.0, 0.0, ended, 200, 100, 3,
        ["least_wait: prefill p0 (20 ms), decode d0 (3 ms)"], router, arrivals, nodes, [],
        alternatives=[Alternative("p0", "prefill", True, 0.02, 0, 5), Alternative("p1", "prefill", False, 0.5, 64, 900)],
    )  # fmt: skip


def part(node: str, role: str, *spans: Span) -> NodePart:
    return NodePart(node, role, "req", list(spans), 0.0, 0.0)


def whole() -> TraceRecord:
    """One request on two nodes: 1 s of reading, a line, two chunks, a handover, two steps."""
    prefill = part(
        "p0", "prefill", Span(P.INBOX, 1.2, 1.3), Span(P.QUEUE, 1.3, 3.0), Span(P.STEP, 3.0, 4.1, 64, 30),
        Span(P.PREFILL, 3.1, 4.0, 64, 30), Span(P.STEP, 4.1, 5.2, 36), Span(P.PREFILL, 4.2, 5.0, 36),
        Span(P.WRITE, 4.5, 5.6, num_bytes=1 << 20),
    )  # fmt: skip
    decode = part(
        "d0", "decode", Span(P.QUEUE, 1.2, 1.4), Span(P.RECEIVE, 1.4, 6.0), Span(P.RESUME, 6.0, 6.2),
        Span(P.STEP, 6.2, 7.2, 1), Span(P.DECODE, 6.3, 7.0, 1), Span(P.STEP, 7.2, 8.2, 1, 5), Span(P.DECODE, 7.3, 8.0, 1, 5),
    )  # fmt: skip
    router = [Span(P.READ, 0.0, 0.6), Span(P.TOKENIZE, 0.6, 1.0), Span(P.FLUSH, 5.3, 5.4), Span(P.FLUSH, 8.3, 8.4)]
    return record(router, [prefill, decode], [Arrival(5.3, "p0", 1), Arrival(7.3, "d0", 1), Arrival(8.3, "d0", 1)], 8.4)


def test_every_moment_has_one_owner() -> None:
    why = explain(whole())
    parts = {(reason.where, reason.what): round(reason.seconds, 6) for reason in why.to_first_token}
    assert parts == {
        ("router", "reading and checking the request"): 0.6,
        ("router", "template and tokens"): 0.4,
        ("", BETWEEN): 0.2,
        ("p0", "until the step under way was over"): 0.1,
        ("p0", "in the node's line"): 1.7,
        ("p0", "planning and booking steps"): 0.5,
        ("p0", "computing the prompt"): 1.7,
        ("p0", "sending KV"): 0.1,
    }
    assert why.first_token_s == pytest.approx(5.3)
    assert sum(reason.seconds for reason in (*why.to_first_token, *why.after)) == pytest.approx(8.4)
    assert why.cause in ("in the node's line (p0)", "computing the prompt (p0)")
    computing = next(reason for reason in why.to_first_token if reason.what == "computing the prompt")
    assert "100 tokens in 2 chunks, 1 shared with 30 tokens of other requests" in computing.detail
    assert why.alternatives[1] == "p1: 500 ms expected, 900 prompt tokens before it, 64 tokens cached"


spans = st.builds(
    lambda phase, start, length: Span(phase, start, start + length, 3, 2),
    st.sampled_from(list(P)),
    st.floats(0, 10),
    st.floats(0, 5),
)


@given(
    router=st.lists(spans, max_size=8),
    first=st.lists(spans, max_size=8),
    second=st.lists(spans, max_size=8),
    arrived=st.lists(st.floats(0, 10), max_size=3),
    ended=st.floats(0, 12),
)
def test_whatever_the_spans_are_the_parts_add_up(
    router: list[Span], first: list[Span], second: list[Span], arrived: list[float], ended: float
) -> None:
    arrivals = [Arrival(min(at, ended), "d0", 1) for at in sorted(arrived)]
    why = explain(record(router, [part("p0", "prefill", *first), part("d0", "decode", *second)], arrivals, ended))
    assert sum(reason.seconds for reason in (*why.to_first_token, *why.after)) == pytest.approx(ended, abs=1e-9)
    assert all(reason.seconds >= 0 for reason in (*why.to_first_token, *why.after))
    if why.first_token_s is not None:
        assert sum(reason.seconds for reason in why.to_first_token) == pytest.approx(why.first_token_s, abs=1e-9)


def test_a_request_that_was_not_traced_is_told_as_its_router_saw_it() -> None:
    why = explain_account(msgspec.structs.replace(QUICK, node_wait_s=5.0, preemptions=2), TARGETS)
    assert [(reason.where, reason.what) for reason in why.to_first_token] == [
        ("router", "reading the request"),
        ("p0", "a node's line"),
        ("p0", "computing the prompt"),
    ]
    assert sum(reason.seconds for reason in (*why.to_first_token, *why.after)) == pytest.approx(why.total_s)
    assert "it lost its blocks 2 times" in why.remarks
    assert not why.traced


def client_of(answers: dict[str, object]) -> TraceClient:
    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path)
        if found is None:
            return httpx.Response(404, json={"error": {"message": "no trace"}})
        return httpx.Response(200, content=msgspec.json.encode(found))

    return TraceClient("http://router", None, httpx.MockTransport(answer))


def test_it_is_found_where_it_is_known() -> None:
    answers: dict[str, object] = {"/traces/traced": whole(), "/ui/state": state()}
    assert explained(client_of(answers), "traced").traced
    assert explained(client_of(answers), "r").request_id == "r"
    assert explained(client_of(answers), "slow").request_id == "slow"
    with pytest.raises(RequestError, match=r"is not among the last 1 requests.*x-request-id header"):
        explained(client_of(answers), "unknown")


@pytest.mark.parametrize("width", [150, 80])
def test_it_is_shown_with_its_sum_and_in_a_narrow_terminal_no_figure_is_cut(width: int) -> None:
    out = Console(file=io.StringIO(), width=width)
    show_explanation(out, explain(whole()))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "first token after 5,300 ms" in " ".join(text.split())
    assert "5,300 ms" in text.split("to the first token")[1]
    assert "p1: 500 ms expected" in " ".join(text.split())
    assert "…" not in text
    json.dumps(msgspec.to_builtins(explain(whole())))
