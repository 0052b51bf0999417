"""One address, several models: requests for another deployment's go through its router, and come back as it answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tandem.base.errors import ConfigurationError
from tandem.router.config import ApiKey, RouterConfig
from tests.router.conftest import RunningRouter, StartRouter, error_of

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 3}


def ask(router: RunningRouter, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    return router.client.post(path, json={**CHAT, **fields})


def events(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


def test_each_model_answers_at_one_address(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, code = two
    assert ask(front, model="fake").json()["model"] == "fake"
    assert code.nodes["d0"].submits == []
    passed_on = ask(front, model="code")
    assert passed_on.json()["choices"][0]["message"] == ask(code, model="code").json()["choices"][0]["message"]
    assert passed_on.json()["model"] == "code"
    assert passed_on.headers["x-tandem-nodes"], "what the other router tells of it"


def test_a_stream_comes_as_it_is_written(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, code = two
    answers = [ask(router, model="code", stream=True) for router in (front, code)]
    texts = []
    for answer in answers:
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = events(answer)
        assert chunks[-1] == "[DONE]"
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks[:-1]]
        texts.append("".join(delta.get("content") or "" for delta in deltas))
    assert texts[0] == texts[1]


def test_all_are_listed_and_what_none_has_is_refused_with_their_names(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, _ = two
    listed = [card["id"] for card in front.client.get("/v1/models").json()["data"]]
    assert listed == ["fake", "code", "fast-code"]
    assert front.client.get("/v1/models/code").json()["max_model_len"] > 0, "as its own router says"
    assert "this server has fake, code, fast-code" in error_of(ask(front, model="none"), 404)["message"]


def test_what_the_other_router_refuses_is_refused_in_its_words(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, _ = two
    answer = ask(front, model="fast-code")  # a name that it does not know itself
    assert "this server has code" in error_of(answer, 404)["message"]
    assert front.client.post("/tokenize", json={"model": "code", "prompt": "a b"}).status_code == 200


def test_keys_and_request_ids_go_with_it(start_router: StartRouter) -> None:
    keys = (ApiKey(name="a", key="secret-of-a"),)
    code = start_router(model_name="code", api_keys=keys)
    front = start_router(other_models={"code": code.url}, api_keys=keys)
    headers = {"authorization": "Bearer secret-of-a", "x-request-id": "mine-1"}
    answer = front.client.post("/v1/chat/completions", json={**CHAT, "model": "code"}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert ask(front, model="code").status_code == 401


def test_a_client_that_goes_away_is_gone_for_the_other_router(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, code = two
    node = code.nodes["d0"]
    node.set(pause_at=2)
    body = {**CHAT, "model": "code", "stream": True}
    with front.client.stream("POST", "/v1/chat/completions", json=body):
        node.wait_until(lambda: bool(node.submits), "the other router has sent it to a node")
    node.wait_until(lambda: bool(node.cancels), "its node hears that it is not wanted")


def test_a_router_that_is_away_is_unavailable_and_one_that_dies_ends_a_stream_with_an_error(
    start_router: StartRouter,
) -> None:
    code = start_router(model_name="code")
    front = start_router(other_models={"code": code.url, "away": "http://127.0.0.1:9"})
    away = ask(front, model="away")
    assert "the router of the model 'away' does not answer" in error_of(away, 503)["message"]
    code.nodes["d0"].set(pause_at=2)
    with front.client.stream("POST", "/v1/chat/completions", json={**CHAT, "model": "code", "stream": True}) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        code.call(code.server.stop())
        rest = [line for line in lines if line.startswith("data: ")]
    assert "error" in rest[-1]


def test_two_routers_that_name_each_other_do_not_pass_it_on_for_ever(start_router: StartRouter) -> None:
    first = start_router(model_name="one")
    second = start_router(model_name="two", other_models={"three": first.url})
    third = start_router(model_name="four", other_models={"three": second.url})
    assert "two routers name each other" in error_of(ask(third, model="three"), 404)["message"]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"fake": "http://a:1"}, "which is this deployment's own model"),
        ({"code": "a:1"}, "must be a router's address such as http"),
        ({"code": "http://a:1/v1"}, "must be a router's address such as http"),
    ],
)
def test_what_names_no_other_router_is_refused(others: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        RouterConfig(tokenizer_path="x", model_name="fake", other_models=others)
