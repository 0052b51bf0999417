"""Traces at OpenTelemetry's collector: a real HTTP server on loopback that keeps what it gets."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from tandem.base.errors import ConfigurationError
from tandem.router.config import TracingConfig
from tandem.router.metrics import RouterMetrics
from tandem.router.tracing.otlp import OtlpExporter, spans_of
from tandem.router.tracing.record import Arrival, NodePart, TraceRecord
from tandem.wire.tracing import Span, TracePhase, TransferRecord
from tests.router.conftest import StartRouter

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    def __init__(self) -> None:
        self.statuses: list[int] = []  # of the next answers; then 200
        self.posts: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with collector.changed:
                    status = collector.statuses.pop(0) if collector.statuses else 200
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    if status == 200:
                        collector.posts.append((self.path, headers, read(body)))
                    collector.changed.notify_all()
                self.send_response(status)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def spans(self) -> dict[str, list[dict[str, Any]]]:
        """The spans, by the instance that reported them."""
        found: dict[str, list[dict[str, Any]]] = {}
        for _, _, body in self.posts:
            for resource in body["resourceSpans"]:
                about = plain(resource["resource"]["attributes"])
                for scope in resource["scopeSpans"]:
                    found.setdefault(about["service.instance.id"], []).extend(scope["spans"])
        return found

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 10), "the collector did not get it"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def read(body: bytes) -> dict[str, Any]:
    """Decodes a request of the protocol into its JSON form, with ids in hexadecimal."""
    found: dict[str, Any] = json_format.MessageToDict(ExportTraceServiceRequest.FromString(body))
    for resource in found["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64decode(span[name]).hex()
    return found


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def record(**fields: Any) -> TraceRecord:
    decode = [Span(TracePhase.INBOX, 101, 102), Span(TracePhase.STEP, 110, 113, 1)]
    decode += [Span(TracePhase.DECODE, 111, 112, 1), Span(TracePhase.DECODE, 114, 117, 1)]
    given: dict[str, Any] = {
        "request_id": "req", "answer_id": "cmpl-1", "trace_id": TRACE, "span_id": "b" * 16, "parent_id": PARENT,
        "trace_state": "congo=x", "route": "/v1/completions", "model": "m", "began": 100.0,
        "began_unix_s": 1_700_000_000.25, "ended": 120.0, "status": 200, "prompt_tokens": 7, "output_tokens": 2,
        "decisions": ["least wait"], "router": [Span(TracePhase.READ, 100, 100.5)],
        "arrivals": [Arrival(113, "d0", 1)], "nodes": [NodePart("d0", "decode", "req-1", decode, 0.0, 0.0)],
        "missing": [],
    }  # fmt: skip
    return TraceRecord(**(given | fields))


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    assert span.context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent


def test_the_request_is_the_callers_child_and_everything_else_is_the_requests() -> None:
    root, read, whole, inbox, decode = spans_of(record(), "tandem")
    assert ids(root) == (TRACE, "b" * 16, PARENT)
    assert root.kind is SpanKind.SERVER
    assert root.context is not None
    assert root.context.trace_state.to_header() == "congo=x"
    assert root.status.status_code is StatusCode.UNSET
    assert root.start_time == 1_700_000_000_250_000_000
    assert root.end_time == 1_700_000_020_250_000_000
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == 7
    assert root.attributes["tandem.time_to_first_token_s"] == 13.0
    named = {name: root.attributes[f"gen_ai.{name}"] for name in ("operation.name", "provider.name", "response.model")}
    assert named == {
        "operation.name": "text_completion",
        "provider.name": "tandem",
        "response.model": root.attributes["gen_ai.request.model"],
    }
    assert ids(read)[2] == ids(whole)[2] == ids(root)[1]
    assert ids(inbox)[2] == ids(decode)[2] == ids(whole)[1]
    assert decode.name == "decode"
    assert decode.attributes is not None
    assert decode.attributes["tandem.steps"] == 2, "steps that follow one another are one span"
    assert (decode.end_time or 0) - (decode.start_time or 0) == 6_000_000_000
    assert whole.resource.attributes["tandem.role"] == "decode"
    assert root.resource.attributes["service.name"] == "tandem"


def test_a_transfer_is_told_with_the_node_that_took_part() -> None:
    transfer = TransferRecord("req-1", "received", 4096, 2, waits={"handshake": 0.25, "register": 0.5})
    nodes = [NodePart("d0", "decode", "req-1", [Span(TracePhase.INBOX, 101, 102)], 0.0, 0.0, transfer=transfer)]
    about = spans_of(record(nodes=nodes), "tandem")[2].attributes
    assert about is not None
    assert about["tandem.transfer.outcome"] == "received"
    assert about["tandem.transfer.bytes"] == 4096
    assert (about["tandem.transfer.handshake_s"], about["tandem.transfer.register_s"]) == (0.25, 0.5)
    assert "tandem.transfer.first_byte_s" not in about


def test_a_request_that_failed_says_so() -> None:
    for status in (500, 503, None):
        assert spans_of(record(status=status), "t")[0].status.status_code is StatusCode.ERROR


def test_a_request_through_a_router_arrives_at_the_collector(
    start_router: StartRouter, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds; five seconds otherwise
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    router = start_router(tracing=TracingConfig(otlp_endpoint=collector.url))
    with router.stream(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}, max_tokens=4) as events:
        assert events.rest()[-1] == "[DONE]"
    collector.wait(lambda: bool(collector.posts))
    path, sent, _ = collector.posts[0]
    assert path == "/v1/traces"
    assert (sent["content-type"], sent["x-team"]) == ("application/x-protobuf", "blue")
    spans = collector.spans()
    assert set(spans) == {"router", "p0", "d0"}
    (root,) = [span for span in spans["router"] if span["kind"] == "SPAN_KIND_SERVER"]
    assert (root["traceId"], root["parentSpanId"]) == (TRACE, PARENT)
    assert {span["traceId"] for found in spans.values() for span in found} == {TRACE}
    about = plain(root["attributes"])
    assert (about["gen_ai.request.max_tokens"], about["gen_ai.request.temperature"]) == ("4", 1.0)
    assert about["gen_ai.response.finish_reasons"] == {"values": [{"stringValue": "length"}]}
    names = [span["name"] for span in spans["router"]]
    assert {"read", "tokenize", "wait", "route", "flush"} <= set(names)
    router.wait_for(lambda: router.metric("tandem_traces_exported_total") == 1, "it is counted")


def test_a_trace_that_no_collector_takes_is_in_the_scrape(
    start_router: StartRouter, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    collector.statuses = [400]
    router = start_router(tracing=TracingConfig(otlp_endpoint=collector.url))
    router.complete(headers={"x-tandem-trace": "1"}, max_tokens=1)
    router.wait_for(lambda: router.metric("tandem_traces_dropped_total", reason="not_sent") == 1, "it is counted")
    line = 'tandem_traces_dropped_total{model_name="fake",reason="not_sent"} 1.0'
    assert line in router.client.get("/metrics").text


def test_what_waits_when_the_router_stops_is_sent(start_router: StartRouter, collector: Collector) -> None:
    router = start_router(tracing=TracingConfig(otlp_endpoint=collector.url))
    router.set(hide_traces=True)
    router.complete(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}, max_tokens=2)
    router.call(router.server.stop())
    (spans,) = collector.spans().values()
    assert plain(spans[0]["attributes"])["tandem.missing"] == "d0, p0"


def exported(collector: Collector, offers: int, **environment: str) -> RouterMetrics:
    """The counters of an exporter without a router, after it has closed."""

    async def go() -> RouterMetrics:
        metrics = RouterMetrics()
        exporter = OtlpExporter(TracingConfig(otlp_endpoint=f"{collector.url}/"), metrics, environment)
        for _ in range(offers):
            exporter.offer(record())
        await exporter.close()
        return metrics

    return asyncio.run(go())


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_what_a_collector_refuses_and_what_does_not_fit_is_counted(collector: Collector) -> None:
    collector.statuses = [400] * 9
    metrics = exported(collector, 3)
    assert value(metrics, "tandem_traces_dropped_total", reason="not_sent") == 3
    assert value(metrics, "tandem_traces_exported_total") == 0
    collector.statuses = []
    metrics = exported(collector, 512 // 5 + 3, OTEL_BSP_MAX_QUEUE_SIZE="512")  # five spans each
    dropped = value(metrics, "tandem_traces_dropped_total", reason="queue_full")
    assert value(metrics, "tandem_traces_exported_total") + dropped == 105
    assert value(metrics, "tandem_traces_dropped_total", reason="not_sent") == 0


def test_the_environment_names_the_collector_and_the_service(
    start_router: StartRouter, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    router = start_router()
    router.complete(headers={"x-tandem-trace": "1"}, max_tokens=1)
    router.call(router.server.stop())
    (path, headers, request) = collector.posts[0]
    assert (path, headers["x-key"]) == ("/v1/traces", "secret")
    assert plain(request["resourceSpans"][0]["resource"]["attributes"])["service.name"] == "ours"


def test_a_collector_that_nobody_can_reach_is_refused_at_once() -> None:
    for url in ("collector:4318", "http://", "http://collector:99999", "http://c/\n", "ftp://c"):
        with pytest.raises(ConfigurationError, match="otlp_endpoint must be an http or https URL"):
            TracingConfig(otlp_endpoint=url)
