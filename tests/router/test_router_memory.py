"""The memory that all requests keep is bounded in total, until they end."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import msgspec
import pytest

from tandem.api.openai.chat_request import ChatRequest
from tandem.base.errors import InvalidRequest, Overloaded
from tandem.http_server.call import HttpCall
from tandem.router.config import Limits, Timeouts
from tandem.router.dispatch import Generation, RequestLife
from tandem.router.http.body import KeptMemory, without_payload
from tandem.router.http.exchange import HttpExchange
from tests.router.conftest import StartRouter, error_of
from tests.router.raw_http import connect, post, read_to_end


def test_a_key_leaves_half_to_others() -> None:
    kept = KeptMemory(100, lambda: None)
    with pytest.raises(InvalidRequest, match="the 50 that one key may have"):
        kept.share(51, "greedy")
    with kept.share(50, "greedy"):
        with pytest.raises(Overloaded, match="this key's part"):
            kept.share(1, "greedy")
        with kept.share(50, "other"):
            assert kept.held == 100
    with kept.share(30, "greedy") as share:
        share.grow(20)
        with pytest.raises(Overloaded):
            share.grow(1)
        share.shrink(50)
        assert kept.held == 0


def test_of_a_key_whose_answers_grow_beyond_its_half_the_largest_ends() -> None:
    kept = KeptMemory(10_000, lambda: None)
    ended: list[str] = []

    def growing(name: str, tokens: int) -> SimpleNamespace:
        ledger = SimpleNamespace(tokens=[0] * tokens, logprobs=SimpleNamespace(nbytes=0))
        return SimpleNamespace(lives=[SimpleNamespace(ledger=ledger, fail=lambda _: ended.append(name))])

    with kept.share(10, "greedy") as small, kept.share(10, "greedy") as large, kept.share(10, "other") as other:
        for share, name, tokens in ((small, "small", 60), (large, "large", 90), (other, "other", 100)):
            share.grows_with(growing(name, tokens), 0)
        kept.measure()
    assert ended == ["large"]
    assert kept.held == 0


def test_a_request_is_kept_without_what_its_plan_was_made_of() -> None:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "x" * 1000}],
        "chat_template_kwargs": {"unused": "y" * 1000},
        "metadata": {"a": "b"},
        "response_format": {"type": "json_object"},
        "user": "z" * 1000,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_logprobs": 5,
    }
    request = msgspec.convert({name: body[name] for name in body if name in ChatRequest.__struct_fields__}, ChatRequest)
    slim = without_payload(request)
    assert not any(letter * 100 in msgspec.json.encode(slim).decode() for letter in "xyz")
    assert (slim.stream, slim.stream_options, slim.top_logprobs, slim.model) == (
        True,
        request.stream_options,
        5,
        "fake",
    )


def test_a_request_that_could_never_fit_is_refused_before_anything_is_computed(start_router: StartRouter) -> None:
    router = start_router(prefill=0, limits=Limits(kept_bytes=1 << 20))
    assert "1048576" in error_of(router.complete(max_tokens=1000, n=8, logprobs=20), 400)["message"]
    assert router.nodes["d0"].submits == []
    assert router.complete(max_tokens=10, n=8, logprobs=20).status_code == 200
    router.wait_for(lambda: router.server.services.kept.held == 0, "it is given back")


def test_what_a_running_request_keeps_keeps_others_out(start_router: StartRouter) -> None:
    router = start_router(prefill=0, limits=Limits(kept_bytes=300_000))
    router.nodes["d0"].set(pause_at=1)
    with router.stream(max_tokens=3, n=30) as events:
        events.text(count=1)
        refused = router.complete(max_tokens=3, n=30)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    router.wait_for(lambda: router.server.services.kept.held == 0, "it is given back")
    assert router.metric("tandem_requests_refused_total", reason="memory") == 1


def test_of_answers_that_grow_too_large_the_largest_is_ended(start_router: StartRouter) -> None:
    router = start_router(prefill=0, limits=Limits(kept_bytes=200_000))
    node = router.nodes["d0"]
    node.set(pause_at=1)
    with router.stream(max_tokens=3, seed=4) as narrow:
        narrow.text(count=1)
        node.resume()
        with router.stream(max_tokens=2000, n=10, logprobs=20) as wide:
            last = wide.rest()[-1]
        assert last["error"]["code"] == "overloaded"
    assert router.complete(max_tokens=3).status_code == 200


LONG = {"max_model_len": 8_000_000}


def test_the_tokens_of_a_tokenized_prompt_count_like_those_of_a_running_request(start_router: StartRouter) -> None:
    router = start_router(prefill=0, node=LONG, limits=Limits(kept_bytes=1 << 20))
    refused = router.client.post("/tokenize", json={"prompt": "\U0001f9ff" * 20_000})
    assert "router.limits.kept_bytes" in error_of(refused, 400)["message"]
    assert router.client.post("/tokenize", json={"prompt": "\U0001f9ff" * 20}).status_code == 200
    router.wait_for(lambda: router.server.services.kept.held == 0, "it is given back")


@pytest.mark.slow
def test_a_tokenized_prompt_counts_until_its_answer_was_read_and_no_longer_than_a_request_may_last(
    start_router: StartRouter,
) -> None:
    """Slow: the answer must be larger than what the sockets hold, and the request lasts as long as it may."""
    router = start_router(prefill=0, node=LONG, timeouts=Timeouts(total=5.0, slow_reader=600))
    kept = router.server.services.kept
    body = json.dumps({"prompt": "jq" * 300_000, "return_token_strs": True}).encode()
    with closing(connect(router, receive_buffer=4096)) as connection:
        connection.settimeout(20)
        connection.sendall(post(body, "/tokenize", content_length=str(len(body))))
        router.wait_for(lambda: kept.held > 1_000_000, "its answer is being sent")
        router.wait_for(lambda: kept.held == 0, "it is cut off")
        assert not read_to_end(connection).endswith(b"0\r\n\r\n")


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_request_is_freed_when_it_ends_and_not_when_garbage_is_looked_for(
    start_router: StartRouter, no_garbage_collection: None
) -> None:
    def kept() -> int:
        parts = (RequestLife, Generation, HttpCall, HttpExchange)
        return sum(type(each) in parts for each in gc.get_objects())

    router = start_router()
    assert router.complete(max_tokens=1).status_code == 200
    before = kept()
    assert router.complete(max_tokens=5, n=2).status_code == 200
    assert router.chat(max_tokens=5).status_code == 200
    assert router.complete(max_tokens=0).status_code == 400
    events = router.stream(max_tokens=5)
    events.text(count=5)
    events.close()
    router.wait_for(router.idle, "all have ended")
    router.wait_for(lambda: kept() <= before, "all are freed")
