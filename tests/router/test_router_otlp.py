"""Traces at OpenTelemetry's collector: a real HTTP server on loopback that keeps what it gets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tandem.router.config import TracingConfig
from tandem.router.metrics import RouterMetrics
from tandem.router.tracing import export
from tandem.router.tracing.export import OtlpExporter
from tandem.router.tracing.otlp import export_request
from tandem.router.tracing.record import Arrival, NodePart, TraceRecord
from tandem.wire.errors import ConfigurationError
from tandem.wire.tracing import Phase, Span, TransferRecord
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
                        collector.posts.append((self.path, headers, json.loads(body)))
                    collector.changed.notify_all()
                self.send_response(status)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    def spans(self) -> dict[str, list[dict[str, Any]]]:
        """By the instance that they happened on."""
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


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def record(**fields: Any) -> TraceRecord:
    decode = [Span(Phase.INBOX, 101, 102), Span(Phase.STEP, 110, 113, 1), Span(Phase.DECODE, 111, 112, 1)]
    decode += [Span(Phase.DECODE, 114, 117, 1)]
    given: dict[str, Any] = {
        "request_id": "req", "answer_id": "cmpl-1", "trace_id": TRACE, "span_id": "b" * 16, "parent_id": PARENT,
        "trace_state": "congo=x", "route": "/v1/completions", "model": "m", "began": 100.0,
        "began_unix_s": 1_700_000_000.25, "ended": 120.0, "status": 200, "prompt_tokens": 7, "output_tokens": 2,
        "decisions": ["least wait"], "router": [Span(Phase.READ, 100, 100.5)],
        "arrivals": [Arrival(113, "d0", 1)], "nodes": [NodePart("d0", "decode", "req-1", decode, 0.0, 0.0)],
        "missing": [],
    }  # fmt: skip
    return TraceRecord(**(given | fields))


def test_the_request_is_the_callers_child_and_everything_else_is_the_requests() -> None:
    router, node = export_request([record()], "tandem")["resourceSpans"]
    root, read = router["scopeSpans"][0]["spans"]
    assert (root["traceId"], root["parentSpanId"], root["spanId"]) == (TRACE, PARENT, "b" * 16)
    assert root["kind"] == 2
    assert root["traceState"] == "congo=x"
    assert "status" not in root
    assert root["startTimeUnixNano"] == "1700000000250000000"
    assert root["endTimeUnixNano"] == "1700000020250000000"
    about = plain(root["attributes"])
    assert about["gen_ai.usage.input_tokens"] == "7"
    assert about["gen_ai.server.time_to_first_token"] == 13.0
    assert read["parentSpanId"] == root["spanId"]
    whole, inbox, decode = node["scopeSpans"][0]["spans"]
    assert whole["parentSpanId"] == root["spanId"]
    assert {inbox["parentSpanId"], decode["parentSpanId"]} == {whole["spanId"]}
    assert decode["name"] == "decode"
    assert plain(decode["attributes"])["tandem.steps"] == "2", "steps that follow one another are one span"
    assert (int(decode["endTimeUnixNano"]) - int(decode["startTimeUnixNano"])) == 6_000_000_000
    assert plain(node["resource"]["attributes"])["tandem.role"] == "decode"


def test_a_transfer_is_told_with_the_node_that_took_part() -> None:
    transfer = TransferRecord("req-1", "received", 4096, 2, handshake_s=0.25, register_s=0.5)
    nodes = [NodePart("d0", "decode", "req-1", [Span(Phase.INBOX, 101, 102)], 0.0, 0.0, transfer=transfer)]
    _, node = export_request([record(nodes=nodes)], "tandem")["resourceSpans"]
    about = plain(node["scopeSpans"][0]["spans"][0]["attributes"])
    assert about["tandem.transfer.outcome"] == "received"
    assert about["tandem.transfer.bytes"] == "4096"
    assert (about["tandem.transfer.handshake_s"], about["tandem.transfer.register_s"]) == (0.25, 0.5)
    assert "tandem.transfer.first_byte_s" not in about


@pytest.mark.parametrize("status", [500, 503, None])
def test_a_request_that_failed_says_so(status: int | None) -> None:
    root = export_request([record(status=status)], "t")["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert root["status"] == {"code": 2}


def test_a_request_through_a_router_arrives_at_the_collector(
    start_router: StartRouter, collector: Collector
) -> None:
    tracing = TracingConfig(otlp_endpoint=collector.url, otlp_headers={"x-team": "blue"}, service_name="mine")
    router = start_router(tracing=tracing)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"model": "fake", "prompt": "the fox", "max_tokens": 4, "stream": True}
    with router.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.read().endswith(b"[DONE]\n\n")
    collector.wait(lambda: bool(collector.posts))
    path, sent, _ = collector.posts[0]
    assert path == "/v1/traces"
    assert (sent["content-type"], sent["x-team"]) == ("application/json", "blue")
    spans = collector.spans()
    assert set(spans) == {"router", "p0", "d0"}
    (root,) = [span for span in spans["router"] if span["kind"] == 2]
    assert (root["traceId"], root["parentSpanId"]) == (TRACE, PARENT)
    assert {span["traceId"] for found in spans.values() for span in found} == {TRACE}
    names = [span["name"] for span in spans["router"]]
    assert {"read", "tokenize", "wait", "route", "flush"} <= set(names)
    router.wait_for(lambda: router.metric("tandem_traces_exported_total") == 1, "it is counted")


def test_what_waits_when_the_router_stops_is_sent(start_router: StartRouter, collector: Collector) -> None:
    router = start_router(tracing=TracingConfig(otlp_endpoint=collector.url))
    for node in router.nodes.values():
        node.set(hide_traces=True)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    router.client.post(
        "/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 2}, headers=headers
    )
    router.call(router.server.stop())
    (spans,) = collector.spans().values()
    assert plain(spans[0]["attributes"])["tandem.missing"] == "d0, p0"


class TestExporter:
    """On an event loop of its own, without a router."""

    def run(
        self,
        answer: Callable[[httpx.Request], httpx.Response],
        offers: int,
        until: Callable[[RouterMetrics], bool],
    ) -> RouterMetrics:
        async def go() -> RouterMetrics:
            metrics = RouterMetrics()
            config = TracingConfig(otlp_endpoint="http://collector:4318/")
            exporter = OtlpExporter(config, metrics, httpx.MockTransport(answer))
            for _ in range(offers):
                exporter.offer(record())
            task = asyncio.create_task(exporter.run())
            async with asyncio.timeout(10):
                while not until(metrics):  # noqa: ASYNC110 (a counter has no event)
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return metrics

        return asyncio.run(go())

    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(export, "FIRST_PAUSE_S", 0.0)

    def value(self, metrics: RouterMetrics, name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(name, labels) or 0.0

    def test_a_collector_that_is_busy_is_asked_again(self) -> None:
        statuses = [503, 429, 200]
        metrics = self.run(
            lambda request: httpx.Response(statuses.pop(0)),
            1,
            lambda metrics: self.value(metrics, "tandem_traces_exported_total") == 1,
        )
        assert not statuses
        assert self.value(metrics, "tandem_traces_dropped_total", reason="unreachable") == 0

    def test_one_that_refuses_is_not(self) -> None:
        asked = []

        def refuse(request: httpx.Request) -> httpx.Response:
            asked.append(request.url)
            return httpx.Response(400, text="no")

        self.run(
            refuse,
            3,
            lambda metrics: self.value(metrics, "tandem_traces_dropped_total", reason="refused") == 3,
        )
        assert [str(url) for url in asked] == ["http://collector:4318/v1/traces"], "three in one post"

    def test_one_that_is_away_costs_traces_and_nothing_else(self) -> None:
        asked = []

        def away(request: httpx.Request) -> httpx.Response:
            asked.append(1)
            raise httpx.ConnectError("nobody")

        self.run(
            away,
            1,
            lambda metrics: self.value(metrics, "tandem_traces_dropped_total", reason="unreachable") == 1,
        )
        assert len(asked) == export.ATTEMPTS

    def test_what_does_not_fit_is_counted(self) -> None:
        metrics = self.run(
            lambda request: httpx.Response(200),
            export.QUEUED + 5,
            lambda metrics: self.value(metrics, "tandem_traces_exported_total") == export.QUEUED,
        )
        assert self.value(metrics, "tandem_traces_dropped_total", reason="queue_full") == 5


@pytest.mark.parametrize(
    "url", ["collector:4318", "http://", "http://collector:99999", "http://c/\n", "ftp://c"]
)
def test_a_collector_that_nobody_can_reach_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigurationError, match="otlp_endpoint must be an http or https URL"):
        TracingConfig(otlp_endpoint=url)


@pytest.mark.parametrize(
    "headers", [{"x-key": "schlüssel"}, {"x key": "a"}, {"": "a"}, {"x-key": "a\r\nb: c"}]
)
def test_headers_that_cannot_be_sent_are_refused_by_name(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="otlp_headers"):
        TracingConfig(otlp_endpoint="http://collector:4318", otlp_headers=headers)
