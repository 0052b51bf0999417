"""`tandem status` fits a cluster on one screen."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console

from tandem.base.errors import ConfigurationError, InternalError, RequestError
from tandem.cluster.cli import make_parser
from tandem.cluster.commands.status import RouterOverview, fetch_status


def cluster(**router: Any) -> dict[str, Any]:
    node = {
        "node_id": "decode-0",
        "role": "decode",
        "epoch": 1234567890123,
        "state": "ready",
        "unusable": None,
        "running": 3,
        "waiting": 1,
        "free_blocks": 90,
        "total_blocks": 100,
        "transfers": 2,
        "detail": "",
        "counters": {"transfer_bytes_sent": 0, "transfer_bytes_received": 3 << 20},
    }
    silent = {
        "node_id": "prefill-0",
        "role": "prefill",
        "epoch": 5,
        "state": "unknown",
        "unusable": "not heard of yet",
    }
    defaults = {"model": "tiny", "running": 1, "queued": 0, "draining": False, "unhealthy": None}
    return {"router": defaults | router, "nodes": [silent, node]}


def shown(content: dict[str, Any]) -> tuple[int, str]:
    out = io.StringIO()
    seen = RouterOverview(content)
    seen.show(Console(file=out, width=80))
    return 0 if seen.serves else 1, out.getvalue()


def test_every_node_has_a_line_that_fits_and_trouble_has_a_reason() -> None:
    status, text = shown(cluster())
    assert status == 0
    assert "tiny: serving; 1 request running, 0 queued" in text
    (line,) = [line for line in text.splitlines() if line.startswith("decode-0")]
    assert all(part in line for part in ("ready", "90/100", "3.0 MiB"))
    assert "prefill-0: not heard of yet" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_cluster_that_cannot_serve_says_why_and_fails() -> None:
    status, text = shown(cluster(unhealthy="no decode node", draining=True))
    assert status == 1
    assert "unavailable: no decode node" in text
    assert "draining" in text


def test_what_is_fetched_is_checked() -> None:
    content = cluster()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=content))
    assert fetch_status("http://tandem", "k", transport) == content
    for answer, error in [
        (httpx.Response(401, text="who are you"), RequestError),
        (httpx.Response(200, json={"other": 1}), InternalError),
    ]:
        with pytest.raises(error):
            fetch_status("http://tandem", None, httpx.MockTransport(lambda request, answer=answer: answer))


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--watch", "0"], "--watch must be seconds from 0.2"),
    ],
)
def test_a_watch_that_cannot_be_meant_is_refused_before_anything_is_asked(
    words: list[str], wrong: str
) -> None:
    options = make_parser().parse_args(["status", "--url", "http://127.0.0.1:1", *words])
    with pytest.raises(ConfigurationError, match=wrong):
        options.run(options)


@pytest.mark.parametrize("words", [[], ["-o", "json"]])
def test_a_watch_shows_the_router_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    asked: list[str] = []

    def fetch(url: str, key: str | None) -> dict[str, Any]:
        asked.append(url)
        if len(asked) == 3:
            raise InternalError("it is gone")
        return {
            "router": {"model": "m", "unhealthy": None, "running": 0, "queued": 0, "draining": False},
            "nodes": [],
        }

    monkeypatch.setattr("tandem.cluster.commands.status.fetch_status", fetch)
    options = make_parser().parse_args(["status", "--url", "http://router", "--watch", "0.2", *words])
    with pytest.raises(InternalError, match="it is gone"):
        options.run(options)
    assert asked == ["http://router"] * 3
    if words:
        looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [look["router"]["model"] for look in looks] == ["m", "m"]
