"""`tandem status --url`: the cluster on one screen, from one router."""

from __future__ import annotations

import io
import json
import ssl
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console

from tandem.base.errors import ConfigurationError, InternalError, RequestError, Unavailable
from tandem.cluster.api_client import ApiClient, trusted
from tandem.cluster.cli import make_parser
from tandem.cluster.commands import overview
from tandem.cluster.commands.overview import Overview
from tandem.router.page_state import NodeRow, PageState, PoolRow, ProcessState
from tandem.wire.forecasts import ForecastScore
from tests.cluster.page_states import page_with


def page(**router: Any) -> PageState:
    nodes = [
        NodeRow("prefill-0", "prefill", "unknown", "not heard of yet", is_silent=True),
        NodeRow("decode-1", "decode", "left out", "other weights", is_silent=True),
        NodeRow("decode-0", "decode", "ready", "", 3, 1, used_blocks=10, total_blocks=100, bytes_received=3 << 20),
    ]
    pools = [PoolRow("decode", wanted=3, ready=1, starting=1, waiting=1)]
    return msgspec.structs.replace(page_with(model="tiny", running=1, **router), nodes=nodes, pools=pools)


def shown(state: PageState) -> tuple[int, str]:
    out = io.StringIO()
    seen = Overview.of_router("http://r", None, lambda url, key: state)
    seen.show(Console(file=out, width=80))
    return 0 if seen.serves else 1, out.getvalue()


def test_every_node_has_a_line_that_fits_and_trouble_has_a_reason() -> None:
    status, text = shown(page())
    assert status == 0
    lines = text.splitlines()
    assert lines[:2] == ["tiny", "http://r: serving, 1 request running, 0 queued"]
    assert "decode: 1 of 3 nodes ready, 1 starting, 1 node without a machine" in lines
    (line,) = [line for line in lines if line.startswith("decode-0")]
    assert all(part in line for part in ("ready", "90/100", "3.0 MiB"))
    assert "prefill-0: not heard of yet" in text
    assert "! decode-1: other weights" in lines, "a node that is no member is shown, too"
    assert all(len(line) <= 80 for line in lines)


def test_what_forecasts_were_worth_is_said_and_a_router_process_that_does_not_answer_is_named() -> None:
    score = ForecastScore(graded=3, said=["the last one came inside", "2 of 3 were inside [all]"])
    processes = [ProcessState("router", True), ProcessState("router~2", False)]
    lines = shown(page(forecasts=score, processes=processes))[1].splitlines()
    assert "forecast: the last one came inside" in lines
    assert "forecast: 2 of 3 were inside [all]" in lines
    assert "! router: no answer from router~2: not counted" in lines


def test_a_cluster_that_cannot_serve_says_why_and_fails() -> None:
    status, text = shown(page(unhealthy="no decode node", draining=True))
    assert status == 1
    assert "unavailable: no decode node" in text
    assert "draining" in text


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (httpx.Response(401, text="who are you"), RequestError, "who are you"),
        (httpx.Response(200, json={"other": 1}), InternalError, "did not answer like a Tandem router"),
        (httpx.Response(302, headers={"location": "https://tandem/"}), Unavailable, "sends to https://tandem/: name"),
    ],
)
def test_what_is_fetched_is_checked(answer: httpx.Response, error: type[Exception], why: str) -> None:
    client = ApiClient("http://tandem", None, httpx.MockTransport(lambda request: answer))
    with pytest.raises(error, match=why):
        client.read("/ui/state", PageState)


def test_a_watch_that_cannot_be_meant_is_refused_before_anything_is_asked() -> None:
    options = make_parser().parse_args(["status", "--url", "http://127.0.0.1:1", "--watch", "0"])
    with pytest.raises(ConfigurationError, match=r"--watch must be seconds from 0\.2"):
        options.run(options)


@pytest.mark.parametrize("words", [[], ["-o", "json"]])
def test_a_watch_shows_the_router_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    asked: list[str] = []

    class Client:
        def __init__(self, url: str, key: str | None) -> None:
            self._url = url

        def read(self, path: str, kind: Any) -> Any:
            if path == "/cluster":
                return {"router": {"model": "tiny"}, "pools": [], "nodes": []}
            asked.append(self._url + path)
            if len(asked) == 3:
                raise InternalError("it is gone")
            return page()

        def close(self) -> None: ...

    monkeypatch.setattr(overview, "ApiClient", Client)
    options = make_parser().parse_args(["status", "--url", "http://router", "--watch", "0.2", *words])
    with pytest.raises(InternalError, match="it is gone"):
        options.run(options)
    assert asked == ["http://router/ui/state"] * 3
    if words:
        looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [look["router"]["model"] for look in looks] == ["tiny", "tiny"]


def test_a_certificate_is_verified_however_the_urls_scheme_is_written() -> None:
    for url in ("https://127.0.0.1", "HTTPS://127.0.0.1"):
        assert isinstance(trusted(url), ssl.SSLContext)
    for url in ("http://a..b:8000", f"http://{'a' * 64}:8000", "ftp://a"):
        with pytest.raises(ConfigurationError, match="is no URL"):
            ApiClient(url)
