"""One address, several models: requests for another deployment's go through its router, and come back as it answers."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import httpx
import pytest
from wsproto.events import CloseConnection, RejectConnection

from tandem.base.errors import ConfigurationError
from tandem.router.config import ApiKey, RouterConfig
from tests.realtime_client import RealtimeClient
from tests.router.conftest import RunningRouter, StartRouter

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 3}


@pytest.fixture
def two(start_router: StartRouter) -> tuple[RunningRouter, RunningRouter]:
    code = start_router(model_name="code")
    return start_router(other_models={"code": code.url, "fast-code": f"{code.url}/"}), code


def ask(router: RunningRouter, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    return router.client.post(path, json={**CHAT, **fields})


def events(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


def test_each_model_answers_at_one_address(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, code = two
    assert ask(front, model="fake").json()["model"] == "fake"
    assert code.nodes["d0"].submits == []
    passed_on = ask(front, model="code")
    assert (
        passed_on.json()["choices"][0]["message"] == ask(code, model="code").json()["choices"][0]["message"]
    )
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


def test_all_are_listed_and_what_none_has_is_refused_with_their_names(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, _ = two
    listed = [card["id"] for card in front.client.get("/v1/models").json()["data"]]
    assert listed == ["fake", "code", "fast-code"]
    assert front.client.get("/v1/models/code").json()["max_model_len"] > 0, "as its own router says"
    unknown = ask(front, model="none")
    assert unknown.status_code == 404
    assert "this server has fake, code, fast-code" in unknown.json()["error"]["message"]


def test_what_the_other_router_refuses_is_refused_in_its_words(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, _ = two
    answer = ask(front, model="fast-code")  # a name that it does not know itself
    assert answer.status_code == 404
    assert "this server has code" in answer.json()["error"]["message"]
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


def test_a_client_that_goes_away_is_gone_for_the_other_router(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
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
    assert away.status_code == 503
    assert "the router of the model 'away' does not answer" in away.json()["error"]["message"]
    code.nodes["d0"].set(pause_at=2)
    with front.client.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "model": "code", "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        code.call(code.server.stop())
        rest = [line for line in lines if line.startswith("data: ")]
    assert "error" in rest[-1]


def test_two_routers_that_name_each_other_do_not_pass_it_on_for_ever(start_router: StartRouter) -> None:
    first = start_router(model_name="one")
    second = start_router(model_name="two", other_models={"three": first.url})
    third = start_router(model_name="four", other_models={"three": second.url})
    answer = ask(third, model="three")
    assert answer.status_code == 404
    assert "two routers name each other" in answer.json()["error"]["message"]


def test_a_conversation_goes_to_the_model_that_its_address_names(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, code = two
    with closing(RealtimeClient(front.url, query="?model=code")) as client:
        assert client.hear("session.created")["session"]["model"] == "code"
        for text in ("h", "i"):
            client.say("input_text_buffer.append", text=text)
        client.say("input_text_buffer.commit")
        client.say("response.create", response={"seed": 3, "max_output_tokens": 5, "temperature": 1.0})
        said = client.hear("response.output_text.done")["text"]
        client.hear("response.done")
    chat = code.chat("hi", seed=3, max_tokens=5, temperature=1.0).json()
    assert said == chat["choices"][0]["message"]["content"]
    assert front.nodes["d0"].submits == []


def test_the_address_may_name_the_served_model_and_nothing_that_none_has(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, _ = two
    with closing(RealtimeClient(front.url, query="?model=fake")) as client:
        assert client.hear("session.created")["session"]["model"] == "fake"
        client.say("session.update", session={"type": "realtime", "model": "code"})
        with pytest.raises(AssertionError, match=r"connect with /v1/realtime\?model=code"):
            client.hear("session.updated")
    with closing(RealtimeClient(front.url, query="?model=none")) as client:
        assert isinstance(client.opened, RejectConnection)
        assert client.opened.status_code == 404
    answer = front.client.get("/v1/realtime?model=code")  # no WebSocket: its router says so
    assert answer.status_code == 426


def test_a_conversation_ends_with_the_client_with_the_other_router_and_with_this_one(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, code = two
    node = code.nodes["d0"]
    node.set(pause_at=2)
    with closing(RealtimeClient(front.url, query="?model=code")) as client:
        client.say("input_text_buffer.append", text="hi")
        client.say("input_text_buffer.commit")
        client.say("response.create", response={"max_output_tokens": 50})
        node.wait_until(lambda: bool(node.submits), "the other router has sent it to a node")
    node.wait_until(lambda: bool(node.cancels), "its node hears that it is not wanted")
    with (
        closing(RealtimeClient(front.url, query="?model=code")) as stays,
        closing(RealtimeClient(front.url, query="?model=code")) as other,
    ):
        for client in (stays, other):
            client.hear("session.created")
        stays.send(CloseConnection(code=1000))
        assert isinstance(stays.next_event(), CloseConnection)
        front.call(front.server.stop())
        ended = other.next_event()
        assert isinstance(ended, CloseConnection)
        assert ended.code == 1001
    with closing(RealtimeClient(code.url)) as client:
        client.hear("session.created")  # it serves on


def test_a_conversation_hears_that_the_other_router_stops(two: tuple[RunningRouter, RunningRouter]) -> None:
    front, code = two
    with closing(RealtimeClient(front.url, query="?model=code")) as client:
        client.hear("session.created")
        code.call(code.server.stop())
        ended = client.next_event()
        assert isinstance(ended, CloseConnection)
        assert ended.code == 1001


def test_a_response_is_found_by_its_id_at_whichever_deployment_made_it(
    two: tuple[RunningRouter, RunningRouter],
) -> None:
    front, code = two
    for model in ("fake", "code"):
        made = front.client.post(
            "/v1/responses", json={"model": model, "input": "hi", "max_output_tokens": 3}
        )
        response_id = made.json()["id"]
        found = front.client.get(f"/v1/responses/{response_id}")
        assert found.json() == made.json()
        assert front.client.delete(f"/v1/responses/{response_id}").json()["deleted"]
        assert front.client.get(f"/v1/responses/{response_id}").status_code == 404
    made = front.client.post(
        "/v1/responses", json={"model": "code", "input": "hi", "max_output_tokens": 3, "background": True}
    )
    path = f"/v1/responses/{made.json()['id']}"
    assert "response.incomplete" in front.client.get(path, params={"stream": "true"}).text
    assert front.client.post(f"{path}/cancel").json()["status"] == "incomplete"
    code.call(code.server.stop())
    away = front.client.get(path)
    assert away.status_code == 503
    assert "the routers of these models do not answer: fast-code" in away.json()["error"]["message"]


def test_a_response_that_no_router_has_is_not_looked_for_for_ever(start_router: StartRouter) -> None:
    first = start_router(model_name="one")
    second = start_router(model_name="two", other_models={"one": first.url})
    third = start_router(model_name="three", other_models={"two": second.url})
    answer = third.client.get(f"/v1/responses/resp_{'0' * 48}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "response_not_found"


def test_a_router_that_does_not_know_the_key_has_no_response_of_it(start_router: StartRouter) -> None:
    code = start_router(model_name="code", api_keys=(ApiKey(name="b", key="secret-of-b"),))
    front = start_router(other_models={"code": code.url}, api_keys=(ApiKey(name="a", key="secret-of-a"),))
    headers = {"authorization": "Bearer secret-of-a"}
    answer = front.client.get(f"/v1/responses/resp_{'0' * 48}", headers=headers)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "response_not_found"


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
