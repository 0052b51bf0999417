"""A traced request, through a router with fake nodes: whose parts are there, by whose clock, and who may see it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tandem.router.config import ApiKey, TracingConfig
from tandem.router.tracing.record import TraceRecord, TraceSummary, parse_context
from tandem.router.tracing.traces import READINGS, Clocks, Traces
from tandem.router.tracing.wing import TraceWing
from tandem.wire.nodes import Role
from tandem.wire.tracing import ClockReading, TracePhase
from tests.router.conftest import RunningRouter, StartRouter, bearer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASK = {"x-tandem-trace": "1"}


def ask(router: RunningRouter, headers: dict[str, str], **fields: object) -> str:
    """The request's id."""
    response = router.complete(headers=headers, **{"max_tokens": 5, **fields})
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


def trace_of(router: RunningRouter, name: str, *, complete: bool = True) -> TraceRecord:
    traces = traces_of(router)
    if complete:
        router.wait_for(
            lambda: (found := traces.find(name)) is not None and found.ended is not None and not found.missing,
            "the nodes' parts",
        )
    response = router.client.get(f"/traces/{name}")
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=TraceRecord)


def traces_of(router: RunningRouter) -> Traces:
    return router.wing(TraceWing).traces


def test_router_and_both_nodes_tell_their_parts_on_one_clock(start_router: StartRouter) -> None:
    router = start_router()
    router.nodes["d0"].set(clock_ahead=5000.0)
    clocks = traces_of(router).clocks
    nodes = [(node.info.node_id, node.info.epoch) for node in router.nodes.values()]
    router.wait_for(lambda: all(clocks.offset(*node) for node in nodes), "the nodes' clocks")
    # Readings from before the clock was set say otherwise until they are forgotten.
    router.look(lambda: clocks.forget(*nodes[1]))
    router.wait_for(lambda: clocks.offset(*nodes[1]) is not None, "the clock again")
    for stream in (False, True):
        record = trace_of(router, ask(router, ASK, stream=stream))
        assert record.status == 200
        assert record.route == "/v1/completions"
        assert record.prompt_tokens > 0
        assert record.output_tokens == sum(arrival.tokens for arrival in record.arrivals) == 5
        assert record.ended is not None
        phases = [span.phase for span in record.router]
        assert phases[:4] == [TracePhase.READ, TracePhase.TOKENIZE, TracePhase.WAIT, TracePhase.ROUTE]
        assert set(phases[4:]) == {TracePhase.FLUSH}
        assert sum(span.tokens for span in record.router if span.phase is TracePhase.FLUSH) == 5
        parts = {part.node_id: part for part in record.nodes}
        assert set(parts) == {"p0", "d0"}
        assert parts["d0"].role is not None
        assert 4999 < parts["d0"].clock_offset_s < 5001
        assert parts["p0"].clock_offset_s == 0
        for span in (*record.router, *(span for part in record.nodes for span in part.spans)):
            assert record.began - 0.1 <= span.start <= span.end <= record.ended + 0.1


def test_tokens_count_as_written_when_they_are_and_not_when_the_stream_ends(start_router: StartRouter) -> None:
    router = start_router()
    router.nodes["d0"].set(pause_at=3)
    stream = router.stream(headers=ASK, max_tokens=6)
    stream.read_header()
    traces = traces_of(router)

    def flushed() -> int:
        (record,) = (traces.find(one.request_id) for one in traces.list().traces)
        assert record is not None
        return sum(span.tokens for span in record.router if span.phase is TracePhase.FLUSH)

    router.wait_for(lambda: flushed() == 3, "three tokens are written while the fourth is waited for")
    router.nodes["d0"].resume()
    router.wait_for(lambda: flushed() == 6, "the rest is written")
    stream.socket.close()


def test_only_who_asks_is_traced_and_nodes_are_told_so(start_router: StartRouter) -> None:
    router = start_router()
    ask(router, {})
    ask(router, {"x-tandem-trace": "0"})
    ask(router, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    ask(router, {"traceparent": "nonsense"})
    assert not traces_of(router).list().traces
    assert not any(submit.trace for node in router.nodes.values() for submit in node.submits)
    name = ask(router, {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "congo=x"})
    record = trace_of(router, name)
    assert (record.trace_id, record.parent_id, record.trace_state) == (TRACE, PARENT, "congo=x")
    assert trace_of(router, TRACE).request_id == name
    assert trace_of(router, name[:8]).request_id == name, "as `tandem top` shows it"
    assert all(node.submits[-1].trace for node in router.nodes.values())


def test_a_share_of_those_who_say_nothing_is_traced_and_the_oldest_are_forgotten(start_router: StartRouter) -> None:
    router = start_router(tracing=TracingConfig(sample=1.0, keep=3))
    names = [ask(router, {}) for _ in range(5)]
    ask(router, {"traceparent": f"00-{TRACE}-{PARENT}-00"})  # decided for the whole trace
    listed = [one["request_id"] for one in router.client.get("/traces").json()["traces"]]
    assert listed == names[:1:-1]
    assert router.client.get(f"/traces/{names[0]}").status_code == 404
    router.wait_for(lambda: len(traces_of(router).by_attempt) == 0, "nothing is kept of traces that are complete")


def test_a_request_that_failed_over_shows_both_attempts(start_router: StartRouter) -> None:
    router = start_router(decode=2)
    decoding = [router.nodes["d0"], router.nodes["d1"]]
    for node in decoding:
        node.set(pause_at=3)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, router, ASK, max_tokens=6)
        router.wait_for(lambda: any(node.running for node in decoding), "a decode node has it")
        busy, other = sorted(decoding, key=lambda node: len(node.running), reverse=True)
        router.remove(busy.info.node_id).kill()
        other.resume()
        record = trace_of(router, asked.result(20), complete=False)
    assert (len(record.decisions), record.output_tokens) == (2, 6)
    assert busy.info.node_id in record.missing, "the dead do not tell"


def test_a_request_that_is_refused_has_a_trace_of_how_far_it_came(start_router: StartRouter) -> None:
    router = start_router()

    def refused(**fields: object) -> list[TraceSummary]:
        assert router.complete(headers=ASK, **{"max_tokens": 1, **fields}).status_code == 400
        return traces_of(router).list().traces

    assert not refused(max_tokens=-1), "it never began"
    (one,) = refused(prompt=[1] * 5000)
    assert one.status == 400
    assert one.seconds is not None


def test_a_node_that_tells_twice_or_of_another_epoch_is_not_believed(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=0, aggregated=1)
    record = trace_of(router, ask(router, ASK))
    assert [part.node_id for part in record.nodes] == ["a0"]
    node = router.nodes["a0"]
    node.tell_trace(node.submits[-1])
    router.nodes["a0"].set(hide_traces=True)
    second = ask(router, ASK)
    submit, pool = node.submits[-1], router.server.services.pool
    node.info = msgspec.structs.replace(node.info, epoch=node.info.epoch + 1)
    before = router.look(lambda: pool.foreign_messages)
    node.tell_trace(submit)
    router.wait_for(lambda: pool.foreign_messages > before, "its next status, and so what it said before, is here")
    assert len(trace_of(router, record.request_id).nodes) == 1
    assert trace_of(router, second, complete=False).missing == ["a0"]
    assert node.role is Role.AGGREGATED


def test_a_trace_that_left_before_its_attempts_came_is_forgotten(start_router: StartRouter) -> None:
    router = start_router(tracing=TracingConfig(keep=1))
    router.nodes["d0"].set(hide_traces=True)

    def attempts_known() -> int:
        traces = traces_of(router)
        first = traces.begin("first", [(b"x-tandem-trace", b"1")])
        assert first is not None
        assert traces.begin("second", [(b"x-tandem-trace", b"1")]) is not None
        first.attempt("attempt", [router.nodes["d0"].info], "why")
        first.end(1.0, "route", 200)
        return len(traces.by_attempt)

    assert router.look(attempts_known) == 0


def test_a_tenant_sees_its_own_traces_and_an_operator_all(start_router: StartRouter) -> None:
    keys = (ApiKey("a", "key-a"), ApiKey("b", "key-b"), ApiKey("op", "key-op", operator=True))
    router = start_router(api_keys=keys, tracing=TracingConfig(keep=4))
    names: dict[str, list[str]] = {"key-a": [], "key-b": []}
    for key in ("key-b", *["key-a"] * 6):
        names[key].append(ask(router, ASK, key=key))

    def seen(key: str) -> list[str]:
        answer = router.client.get("/traces", headers=bearer(key)).json()
        return [trace["request_id"] for trace in answer["traces"]][::-1]

    def status(key: str, name: str) -> int:
        return router.client.get(f"/traces/{name}", headers=bearer(key)).status_code

    for path in ("/traces", f"/traces/{names['key-a'][3]}"):
        assert router.client.get(path).status_code == 401
    assert seen("key-a") == names["key-a"][3:], "who has most gives up its own"
    assert seen("key-b") == names["key-b"]
    assert seen("key-op") == names["key-b"] + names["key-a"][3:]
    assert [status(key, names["key-b"][0]) for key in ("key-a", "key-b", "key-op")] == [404, 200, 200]


def test_a_callers_context_is_carried_on() -> None:
    context = parse_context(f"00-{TRACE}-{PARENT}-01".encode(), b"congo=t61rcWkgMzE,rojo=00f067aa0ba902b7")
    assert context is not None
    assert (context.trace_id, context.parent_id, context.sampled) == (TRACE, PARENT, True)
    assert context.state == "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"
    too_long = parse_context(f"00-{TRACE}-{PARENT}-01".encode(), b"a=" + b"x" * 600)
    assert too_long is not None
    assert too_long.state == ""


@pytest.mark.parametrize(
    ("parent", "sampled"),
    [
        pytest.param(f"00-{TRACE}-{PARENT}-00", False, id="a caller that samples not"),
        pytest.param(
            f"cc-{TRACE}-{PARENT}-03-what-the-future-will-be-like", True, id="a later version with more flags"
        ),
    ],
)
def test_a_context_says_whether_it_is_sampled(parent: str, sampled: bool) -> None:
    context = parse_context(parent.encode())
    assert context is not None
    assert context.sampled is sampled


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-0",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-zz",
    ],
)
def test_what_is_no_context_is_ignored(parent: str) -> None:
    assert parse_context(parent.encode()) is None


class TestClocks:
    def reading(self, clocks: Clocks, asked: float, heard: float, said: float, epoch: int = 1) -> None:
        clocks.heard(ClockReading("n", epoch, asked, said), heard)

    def test_the_shortest_trip_counts(self) -> None:
        clocks = Clocks()
        assert clocks.offset("n", 1) is None
        self.reading(clocks, 10.0, 12.0, 511.9)
        self.reading(clocks, 20.0, 20.002, 520.0015)
        self.reading(clocks, 30.0, 30.5, 530.4)
        offset = clocks.offset("n", 1)
        assert offset is not None
        assert offset.seconds == pytest.approx(500.0005)
        assert offset.error_s == pytest.approx(0.001)

    def test_clocks_that_may_be_one_are_one(self) -> None:
        clocks = Clocks()
        self.reading(clocks, 10.0, 10.002, 10.0002)
        self.reading(clocks, 11.0, 11.004, 11.0039)
        offset = clocks.offset("n", 1)
        assert offset is not None
        assert (offset.seconds, offset.error_s) == (0.0, 0.0)

    def test_a_restarted_node_has_another_clock_and_an_answer_from_the_future_is_none(self) -> None:
        clocks = Clocks()
        self.reading(clocks, 10.0, 9.0, 100.0)
        assert clocks.offset("n", 1) is None
        self.reading(clocks, 10.0, 10.1, 100.0, epoch=2)
        assert clocks.offset("n", 1) is None
        clocks.forget("n", 2)
        assert clocks.offset("n", 2) is None

    def test_old_readings_are_forgotten(self) -> None:
        clocks = Clocks()
        self.reading(clocks, 0.0, 0.001, 70.0)
        for at in range(READINGS):
            self.reading(clocks, at + 1.0, at + 1.1, at + 101.05)
        offset = clocks.offset("n", 1)
        assert offset is not None
        assert offset.error_s == pytest.approx(0.05)
