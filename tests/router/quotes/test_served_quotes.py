"""Quotes at a router's door: before the first token, true, and counted."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import pytest

from tandem.base.errors import Overloaded
from tandem.base.wings import is_there
from tandem.router.quotes.first_tokens import LEAST
from tandem.wire.requests import NodeCounters
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.event_reader import EventReader

HEADER = "x-tandem-quote"
COMPLETIONS = ("/v1/completions", {"prompt": "the fox"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
MESSAGES = ("/v1/messages", CHAT[1])
PATHS = [COMPLETIONS, CHAT, *([MESSAGES] if is_there("tandem.router.messages") else [])]


def ask(
    router: RunningRouter, confidence: str = "0.9", asked: tuple[str, Any] = COMPLETIONS, **fields: Any
) -> httpx.Response:
    return router.ask(asked[0], headers={HEADER: confidence}, **{"max_tokens": 3, **asked[1], **fields})


def stream(router: RunningRouter, confidence: str = "0.9", **fields: Any) -> EventReader:
    return router.stream(headers={HEADER: confidence}, **{"max_tokens": 3, **fields})


def quoted(text: str) -> float:
    found = re.fullmatch(r"first-token-by=(\d+\.\d{3}); confidence=0\.\d+", text)
    assert found, text
    return float(found[1])


RATE = 2_000_000


def with_a_rate(router: RunningRouter, *prefill_nodes: str) -> RunningRouter:
    """The prefill nodes say how fast they read, in two statuses."""
    pool = router.server.services.pool
    for name in prefill_nodes or ("p0",):
        member = pool.member(name)
        assert member is not None
        for seconds in (1.0, 2.0):
            router.nodes[name].set(
                counters=NodeCounters(prompt_tokens_computed=int(RATE * seconds), step_seconds=seconds)
            )
            router.wait_for(lambda s=seconds, m=member: m.rates.seconds == s, "its counters")  # type: ignore[misc]
    return router


@pytest.fixture
def ready(start_router: StartRouter) -> RunningRouter:
    return ready_one(start_router)


def ready_one(start_router: StartRouter, *prefill_nodes: str, **settings: Any) -> RunningRouter:
    """A router that has seen enough requests."""
    router = with_a_rate(start_router(**settings), *prefill_nodes)
    for _ in range(LEAST):
        router.complete(max_tokens=2)
    return router


def told(router: RunningRouter, outcome: str, confidence: str = "0.9") -> float:
    return router.metric("tandem_quotes_total", confidence=confidence, outcome=outcome)


def test_what_is_no_confidence_is_refused(router: RunningRouter) -> None:
    for asked in PATHS:
        for wrong in ("soon", "", "0.4", "1", "0.996", "0.955", "nan", "inf", "-0.9", "1e999", "90%"):
            answer = ask(router, wrong, asked)
            assert answer.status_code == 400, (asked, wrong)
            assert "a number of hundredths from 0.5 to 0.99" in answer.json()["error"]["message"]
    assert not router.nodes["p0"].submits


def test_other_paths_say_that_they_give_none(router: RunningRouter) -> None:
    pytest.importorskip("tandem.router.responses")
    answer = router.client.post("/v1/responses", json={"input": "hi"}, headers={HEADER: "0.9"})
    assert "is of answers at /v1/completions" in error_of(answer, 400)["message"]


def test_a_router_that_knows_too_little_gives_no_number(start_router: StartRouter) -> None:
    router = start_router()
    assert ask(router).headers[HEADER] == "unknown; confidence=0.9; why=no-rate; requests=0; needed=20"
    with_a_rate(router)
    assert ask(router, "0.99").headers[HEADER] == "unknown; confidence=0.99; why=few-requests; requests=0; needed=99"
    ask(router, n=4)
    assert ask(router).headers[HEADER] == "unknown; confidence=0.9; why=few-requests; requests=2; needed=20"
    assert told(router, "unknown") == 3
    assert HEADER not in router.complete().headers


def test_a_whole_answer_says_what_was_expected(ready: RunningRouter) -> None:
    for count, asked in enumerate(PATHS, 1):
        answer = ask(ready, "0.950", asked)
        assert answer.status_code == 200
        assert answer.headers[HEADER].endswith("; confidence=0.95")
        assert 0 < quoted(answer.headers[HEADER]) < 10
        ready.wait_for(
            lambda n=count: told(ready, "kept", "0.95") + told(ready, "missed", "0.95") == n, "it is counted"
        )  # type: ignore[misc]
    assert 'tandem_quotes_total{confidence="0.95"' in ready.client.get("/metrics").text


def test_a_stream_begins_with_the_quote_before_there_is_a_token(ready: RunningRouter) -> None:
    ready.nodes["p0"].set(pause_at=0)
    with stream(ready, "0.5") as half, stream(ready, "0.9") as events:
        assert (half.read_header(), events.read_header()) == (200, 200)
        by = quoted(events.headers[HEADER])
        assert events.headers["x-tandem-nodes"] == "prefill=p0,decode=d0"
        late = time.monotonic() + by
        ready.wait_for(lambda: time.monotonic() > late, "the quote's time has passed")
        ready.nodes["p0"].resume()
        assert len(events.text()) == 3
    ready.wait_for(lambda: told(ready, "missed") == 1, "it was not kept")


def test_without_a_quote_a_failure_before_the_first_token_is_a_status_and_with_one_an_event(
    start_router: StartRouter,
) -> None:
    router = ready_one(start_router, max_failovers=0)
    router.set(refuse=Overloaded("it is full").to_wire())
    with router.stream(max_tokens=3) as events:
        assert events.read_header() == 503
    with stream(router) as events:
        assert events.read_header() == 200
        assert [event["error"]["message"] for event in events.rest()] == ["it is full"]
    router.wait_for(lambda: told(router, "missed") == 1, "no token came in time")


def test_a_client_that_leaves_before_the_time_is_no_quote_kept_or_missed(ready: RunningRouter) -> None:
    ready.nodes["p0"].set(pause_at=0, status_fields={"waiting_tokens": 1000 * RATE, "waiting": 1})
    member = ready.server.services.pool.member("p0")
    assert member is not None
    ready.wait_for(lambda: member.queued_tokens >= 1000 * RATE, "it says that its line is long")
    with stream(ready) as events:
        events.read_header()
        assert quoted(events.headers[HEADER]) > 100
    ready.wait_for(ready.idle, "the router knows that the client left")
    assert told(ready, "kept") == told(ready, "missed") == 0


def test_a_quote_of_another_deployment_comes_through_before_its_first_token(start_router: StartRouter) -> None:
    pytest.importorskip("tandem.router.other_models")
    code = start_router(model_name="code")
    front = start_router(other_models={"code": code.url})
    code.nodes["p0"].set(pause_at=0)
    with stream(front, model="code") as events:
        assert events.read_header() == 200
        assert events.headers[HEADER].startswith("unknown")
        code.nodes["p0"].resume()
        assert len(events.text()) == 3


def test_a_request_that_goes_on_elsewhere_is_learnt_from_with_its_own_first_token(start_router: StartRouter) -> None:
    router = ready_one(start_router, "p0", "p1", prefill=2)
    first, other = router.nodes["p0"], router.nodes["p1"]
    before = quoted(ask(router, "0.5").headers[HEADER])
    for node in (first, other):
        node.set(pause_at=0)
    streams = [stream(router, "0.5") for _ in range(2 * LEAST)]
    late = time.monotonic() + 10 * before
    router.wait_for(lambda: len(first.submits) + len(other.submits) == 3 * LEAST + 1, "all are on nodes")
    router.wait_for(lambda: time.monotonic() > late, "they have waited for long")
    router.remove("p0").kill()
    other.resume()
    for each in streams:
        assert len(each.text()) == 3
        each.close()
    assert router.metric("tandem_failovers_total", reason="node_lost") == LEAST
    assert quoted(ask(router, "0.5").headers[HEADER]) > 3 * before
