"""What pages in a browser can do at a router without keys, and what headers the router's own pages have."""

from __future__ import annotations

import json
import socket

import pytest

from tandem.router.config import ApiKey
from tandem.router.http.hosts import OwnHosts, WrongHost
from tests.router.conftest import RunningRouter, StartRouter, error_of

BODY = json.dumps({"model": "fake", "prompt": "the fox", "max_tokens": 2})


def test_no_other_page_frames_a_page_of_the_router(router: RunningRouter) -> None:
    for path in ("/docs", "/ui"):
        answer = router.client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_site_that_names_itself_127_0_0_1_is_refused(router: RunningRouter) -> None:
    for path in ("/v1/models", "/cluster", "/health"):
        answer = router.client.get(path, headers={"host": "evil.example:8000"})
        assert error_of(answer, 421)["code"] == "misdirected_request"
        assert "localhost" in answer.json()["error"]["message"]
    assert router.client.get("/v1/models").status_code == 200


def test_with_keys_any_name_and_any_type_will_do(start_router: StartRouter) -> None:
    router = start_router(api_keys=(ApiKey("a", "secret"),))
    for host, origin in (("llm.example", None), (None, "http://evil.example")):
        headers = {"authorization": "Bearer secret", "host": host, "origin": origin}
        headers = {name: value for name, value in headers.items() if value}
        assert router.client.post("/v1/completions", content=BODY, headers=headers).status_code == 200


def test_own_names_and_those_of_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7.lab.example")
    own = ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "tandem", "x.localhost", "box.local:80")
    hosts = OwnHosts("127.0.0.1", ("https://llm.example",))
    for host in (*own, "LLM.Example.", "gpu7.lab.example:8000", "[zz]", ""):  # the last two are no names at all
        hosts.check(host.encode())
    for host in 2 * ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000"):
        with pytest.raises(WrongHost):
            hosts.check(host.encode())
    # Beyond loopback a service may have any name.
    OwnHosts("0.0.0.0", ()).check(b"tandem.default.svc.example:8000")
    OwnHosts("127.0.0.1", ("*",)).check(b"evil.example")


def test_a_page_of_another_site_cannot_ask_without_being_asked_for_leave(start_router: StartRouter) -> None:
    """JSON is refused by the browser, which asks the router first and gets no leave."""
    router = start_router(cors_origins=("http://friend.example",))
    for headers, status in (
        ({"origin": "http://evil.example"}, 415),
        ({"origin": "null"}, 415),
        ({"origin": "http://evil.example", "content-type": "text/plain"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({}, 200),
        ({"origin": "http://friend.example"}, 200),
        ({"origin": "http://evil.example", "content-type": "application/json"}, 200),
        ({"origin": router.url}, 200),
    ):
        assert router.client.post("/v1/completions", content=BODY, headers=headers).status_code == status
