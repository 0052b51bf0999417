"""`tandem trace`: the sums that it makes of a trace, and how it prints them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from tandem.base.errors import ConfigurationError, InternalError, RequestError, Unavailable
from tandem.cluster.cli import main
from tandem.cluster.trace import commands
from tandem.cluster.trace.account import first_token_s, handover, rows
from tandem.cluster.trace.command import TraceClient, explained, run
from tandem.cluster.trace.text import show_trace
from tandem.cluster.trace.why import BETWEEN, explain, explain_account
from tandem.cluster.trace.why_text import show_explanation
from tandem.router.policy.choose import Alternative
from tandem.router.tracing.record import Arrival, NodePart, TraceList, TraceRecord, TraceSummary
from tandem.wire.tracing import Span, TracePhase, TransferRecord
from tests.cluster.page_states import state
from tests.router.test_router_recent import QUICK, TARGETS


def record(**fields: Any) -> TraceRecord:
    """A prompt of two chunks on one node, an answer of four tokens on another. Milliseconds, at 50 s."""

    def spans(*given: tuple[Any, ...]) -> list[Span]:
        return [Span(phase, 50 + start / 1e3, 50 + end / 1e3, *more) for phase, start, end, *more in given]

    prefill = spans(
        (TracePhase.INBOX, 5, 7), (TracePhase.QUEUE, 7, 8),
        (TracePhase.STEP, 8, 51, 256), (TracePhase.PREFILL, 9, 50, 256),
        (TracePhase.STEP, 52, 101, 256, 30), (TracePhase.PREFILL, 53, 100, 256, 30),
        (TracePhase.PLAN, 8, 9), (TracePhase.WRITE, 51, 60, 256, 0, 1 << 20), (TracePhase.WRITE, 101, 104, 256, 0, 1 << 20),
        (TracePhase.NOTICE, 104, 107),
    )  # fmt: skip
    decode = spans(
        (TracePhase.INBOX, 5, 5.5), (TracePhase.QUEUE, 5.5, 6), (TracePhase.RECEIVE, 6, 106, 512), (TracePhase.REGISTER, 6, 8),
        (TracePhase.RESUME, 106, 108), (TracePhase.STEP, 108, 131, 1), (TracePhase.DECODE, 109, 129, 1),
        (TracePhase.STEP, 132, 153, 1), (TracePhase.DECODE, 132, 152, 1), (TracePhase.DECODE, 155, 175, 1),
    )  # fmt: skip
    given: dict[str, Any] = {
        "request_id": "req", "answer_id": "cmpl-1", "trace_id": "t" * 32, "span_id": "b" * 16, "parent_id": None,
        "trace_state": "", "route": "/v1/completions", "model": "m", "began": 50.0, "began_unix_s": 1e9,
        "ended": 50.178, "status": 200, "prompt_tokens": 512, "output_tokens": 4, "decisions": ["least wait"],
        "router": spans((TracePhase.READ, 0, 1), (TracePhase.TOKENIZE, 1, 3), (TracePhase.WAIT, 3, 3), (TracePhase.ROUTE, 3, 4),
                        (TracePhase.FLUSH, 102, 103, 1), (TracePhase.FLUSH, 131, 131.5, 1), (TracePhase.FLUSH, 154, 154.5, 1),
                        (TracePhase.FLUSH, 177, 177.5, 1)),
        "arrivals": [Arrival(50.102, "p0", 1), Arrival(50.131, "d0", 1), Arrival(50.154, "d0", 1),
                     Arrival(50.177, "d0", 1)],
        "nodes": [NodePart("p0", "prefill", "r-1", prefill, 0.0, 0.0), NodePart("d0", "decode", "r-1", decode, 2.0, 0.0004)],
        "missing": [],
        "alternatives": [Alternative("p0", "prefill", True, 0.02, 0, 5), Alternative("p1", "prefill", False, 0.5, 64, 900)],
    }  # fmt: skip
    return TraceRecord(**(given | fields))


def named(items: Any) -> dict[str, float]:
    return {item.name: round(item.seconds * 1e3, 3) for item in items}


def test_an_answer_that_is_sent_whole_had_its_first_token_long_before() -> None:
    """`tandem top`, the page and the metrics count the same time."""
    whole = record(router=[Span(TracePhase.FLUSH, 50.177, 50.178, 4)])
    assert first_token_s(whole) == pytest.approx(0.102)
    assert "first token after 102.0 ms, sent whole after 178.0 ms" in shown(whole)


def test_the_parts_of_the_handover_add_up_to_it() -> None:
    parts = named(handover(record()))
    assert parts == {"KV that was left to send": 4.0, "notice": 2.0, "until the first decoding step": 3.0}


def spans_of(*phases: TracePhase) -> st.SearchStrategy[list[Span]]:
    each = st.builds(
        lambda phase, start, length: Span(phase, start, start + length, 3, 2),
        st.sampled_from(phases),
        st.floats(0, 10),
        st.floats(0, 5),
    )
    return st.lists(each, max_size=8)


OF_ROUTERS = [phase for phase in TracePhase if phase is not TracePhase.STEP]


@example(router=[], first=[], second=[], arrived=[], ended=0.0)
@given(
    router=spans_of(*OF_ROUTERS),
    first=spans_of(*TracePhase),
    second=spans_of(*TracePhase),
    arrived=st.lists(st.floats(0, 10), max_size=3),
    ended=st.none() | st.floats(0, 12),
)
def test_any_trace_can_be_shown_and_its_parts_add_up(
    router: list[Span], first: list[Span], second: list[Span], arrived: list[float], ended: float | None
) -> None:
    nodes = [NodePart("p0", "prefill", "r-1", first, 0.0, 0.0), NodePart("d0", "decode", "r-1", second, 0.0, None)]
    arrivals = [Arrival(at if ended is None else min(at, ended), "d0", 1) for at in sorted(arrived)]
    made = record(router=router, nodes=nodes, arrivals=arrivals, began=0.0, ended=ended)
    show_trace(Console(file=io.StringIO(), width=120), made)
    assert all(item.seconds >= 0 for item in handover(made))
    steps = sum(span.phase is TracePhase.STEP for span in (*first, *second))
    assert sum(row.count for row in rows(made)) == len(router) + len(first) + len(second) - steps
    if ended is None:
        return
    why = explain(made)
    assert all(reason.seconds >= 0 for reason in (*why.to_first_token, *why.after))
    assert sum(reason.seconds for reason in (*why.to_first_token, *why.after)) == pytest.approx(ended, abs=1e-9)
    if why.first_token_s is not None:
        assert sum(reason.seconds for reason in why.to_first_token) == pytest.approx(why.first_token_s, abs=1e-9)


def shown(made: TraceRecord) -> str:
    out = io.StringIO()
    show_trace(Console(file=out, width=140), made)
    return out.getvalue()


def test_the_terminal_shows_every_phase_once_and_folds_steps() -> None:
    text = shown(record())
    for said in (
        "512 tokens in, 4 out, 178.0 ms, first token after 102.0 ms",
        "0 … 178.0 ms",
        "decode ×3",
        "20.0 ms each, at most 20.0, 3.00 between",
        "1.0 MiB",
        "handover",
    ):
        assert said in text
    assert text.count("write") == 2
    assert "d0's times are right to within 0.40 ms" in text


def test_the_terminal_says_what_became_of_the_kv() -> None:
    sent = TransferRecord("r-1", "sent", 2 << 20, 32, 40, 1 << 20, waits={"first_byte": 0.0002, "handover": 0.006})
    failed = TransferRecord("r-1", "peer_lost", 0, 0, waits={"handshake": 0.0, "register": 0.002})
    prefill, decode = record().nodes
    nodes = [structs.replace(prefill, transfer=sent), structs.replace(decode, transfer=failed)]
    text = " ".join(shown(record(nodes=nodes)).split())
    assert (
        "p0's KV transfer: sent, 2.0 MiB in 32 blocks, 40 descriptors, 50% while the prompt was computed, "
        "first byte 0.20 ms, handover 6.00 ms" in text
    )
    assert "d0's KV transfer: peer lost, handshake 0.00 ms, register 2.00 ms" in text


def test_what_is_missing_is_said() -> None:
    text = shown(record(missing=["d0"], ended=None, dropped=3, status=503))
    for said in ("d0 has not reported its part", "still running", "3 spans did not fit", "status 503"):
        assert said in text


def client(answer: Any) -> TraceClient:
    return TraceClient("http://r", "k", httpx.MockTransport(answer))


def test_it_waits_for_the_nodes_and_draws_what_it_has(tmp_path: Path) -> None:
    answers = [record(missing=["p0"]), record()]
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=msgspec.json.encode(answers[min(len(asked), 2) - 1]))

    out = io.StringIO()
    png, svg, json = (tmp_path / name for name in ("trace.png", "trace.svg", "trace.json"))
    assert run(client(answer), Console(file=out, width=140), "req/1", png, json) == 0
    assert run(client(answer), Console(file=io.StringIO(), width=140), "req/1", svg, None) == 0
    assert asked[0].url.raw_path == b"/traces/req%2F1"
    assert asked[0].headers["authorization"] == "Bearer k"
    assert "has not told" not in out.getvalue()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()[:400]
    assert msgspec.json.decode(json.read_bytes(), type=TraceRecord) == record()


def test_it_is_json_also_where_a_file_gets_it(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    made = client(lambda request: httpx.Response(200, content=msgspec.json.encode(record())))
    file = tmp_path / "trace.json"
    assert run(made, Console(file=io.StringIO()), "req/1", None, file, as_json=True) == 0
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == file.read_bytes()


def test_without_a_name_the_last_ones_are_listed() -> None:
    one = TraceSummary("req", "cmpl-1", "t", "/v1/completions", 1e9, 0.5, 200, 7, 9)
    for traces, expected in ((TraceList([one]), "cmpl-1"), (TraceList([]), "x-tandem-trace")):
        out = io.StringIO()
        content = msgspec.json.encode(traces)
        made = client(lambda request, content=content: httpx.Response(200, content=content))
        assert run(made, Console(file=out, width=160), None, None, None) == 0
        assert expected in out.getvalue()


def test_mistakes_are_said_in_words(tmp_path: Path) -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no server")

    refused = {"error": {"message": "no trace of 'x' here"}}
    with pytest.raises(Unavailable, match="tandem serve"):
        client(away).find("x")
    with pytest.raises(RequestError, match="no trace of 'x'"):
        client(lambda request: httpx.Response(404, json=refused)).find("x")
    with pytest.raises(Unavailable, match="answered 502: bad gateway"):
        client(lambda request: httpx.Response(502, text="bad gateway")).find("x")
    with pytest.raises(InternalError, match="Tandem router"):
        client(lambda request: httpx.Response(200, json={"other": 1})).find("x")
    made = client(lambda request: httpx.Response(200, content=msgspec.json.encode(record())))
    with pytest.raises(ConfigurationError, match=r"\.png or \.svg"):
        run(made, Console(file=io.StringIO()), "x", tmp_path / "trace.jpg", None)
    with pytest.raises(ConfigurationError, match="for one request: give its id"):
        run(made, Console(file=io.StringIO()), None, None, tmp_path / "trace.json")


def test_the_command_names_the_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "x", "--url", "http://127.0.0.1:9"]) == 1
    assert "--url" in capsys.readouterr().err


def test_without_the_simulator_why_still_explains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "ROWS", ("tandem.room_taken_away.commands",))
    with pytest.raises(SystemExit):
        main(["why", "--help"])
    said = capsys.readouterr().out
    assert "usage: tandem why" in said
    assert "simulate" not in said
    assert "--host" not in said  # it means nothing where nothing serves


def test_every_moment_has_one_owner() -> None:
    why = explain(record())
    parts = {(reason.where, reason.what): round(reason.seconds * 1e3, 3) for reason in why.to_first_token}
    assert parts == {
        ("router", "reading and checking the request"): 1.0,
        ("router", "template and tokens"): 2.0,
        ("router", "choosing nodes and telling them"): 1.0,
        ("", BETWEEN): 1.0,
        ("p0", "until the step under way was over"): 2.0,
        ("p0", "in the node's line"): 1.0,
        ("p0", "planning and booking steps"): 4.0,
        ("p0", "computing the prompt"): 88.0,
        ("p0", "sending KV"): 2.0,
    }
    assert why.cause == "computing the prompt (p0)"
    computing = next(reason for reason in why.to_first_token if reason.what == "computing the prompt")
    assert "512 tokens in 2 chunks, 1 shared with 30 tokens of other requests" in computing.detail
    assert why.alternatives[1] == "p1: 500 ms expected, 900 prompt tokens before it, 64 tokens cached"


def test_a_request_that_was_not_traced_is_told_as_its_router_saw_it() -> None:
    why = explain_account(structs.replace(QUICK, node_wait_s=5.0, preemptions=2), TARGETS)
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
    answers: dict[str, object] = {"/traces/traced": record(), "/ui/state": state()}
    assert explained(client_of(answers), "traced").traced
    assert explained(client_of(answers), "r").request_id == "r"
    assert explained(client_of(answers), "slow").request_id == "slow"
    with pytest.raises(RequestError, match=r"is not among the last 1 requests.*x-request-id header"):
        explained(client_of(answers), "unknown")


@pytest.mark.parametrize("width", [150, 80])
def test_it_is_shown_with_its_sum_and_in_a_narrow_terminal_no_figure_is_cut(width: int) -> None:
    why = explain(record())
    long = [structs.replace(reason, seconds=50 * reason.seconds) for reason in why.to_first_token]
    out = Console(file=io.StringIO(), width=width)
    show_explanation(out, structs.replace(why, total_s=9.0, first_token_s=5.1, to_first_token=long))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "first token after 5,100 ms" in " ".join(text.split())
    assert "5,100 ms" in text.split("to the first token")[1]
    assert "p1: 500 ms expected" in " ".join(text.split())
    assert "…" not in text
    json.dumps(msgspec.to_builtins(why))
