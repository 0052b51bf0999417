"""Background responses outlive the router that began them: any other router finds them on the node that decodes them."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import WireError
from tandem.router.config import ApiKey, Heartbeat
from tandem.router.responses import recall
from tandem.router.responses.wing import Responses
from tandem.wire.nodes import Role
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.fake_node import scripted
from tests.router.raw_http import connect
from tests.router.responses.test_router_responses import TEXT, WEATHER, create, events_of
from tests.waiting import until

Pair = tuple[RunningRouter, RunningRouter]
PATIENT = Heartbeat(ping_interval=0.1, silence=5)


def two_routers(start_router: StartRouter, **settings: Any) -> Pair:
    first = start_router(prefill=2, decode=2, **settings)
    return first, start_router(prefill=0, decode=0, **settings).join(first)


@pytest.fixture
def pair(start_router: StartRouter, thinking_folder: str, tokenizer: Tokenizer, end_token: int) -> Pair:
    script = [*tokenizer.encode(TEXT, special=False), end_token]
    return two_routers(start_router, rule=scripted(script), tokenizer_path=thinking_folder, heartbeat=PATIENT)


def begin_stream(router: RunningRouter, count: int) -> tuple[str, list[dict[str, Any]]]:
    """Begins a background response, reads its first events, and drops the connection. Returns its id and the events."""
    body = {"input": "weather?", "background": True, "stream": True, "tools": [WEATHER]}
    seen: list[dict[str, Any]] = []
    with router.client.stream("POST", "/v1/responses", json=body) as stream:
        for line in stream.iter_lines():
            seen += events_of(line)
            if len(seen) == count:
                break
    return seen[0]["response"]["id"], seen


def stream(router: RunningRouter, response_id: str, after: int = -1) -> list[dict[str, Any]]:
    query = {"stream": "true", "starting_after": after}
    return events_of(router.client.get(f"/v1/responses/{response_id}", params=query).text)


@pytest.fixture
def whole(pair: Pair) -> list[dict[str, Any]]:
    """The events of an undisturbed response, without its ids."""
    begun = create(pair[0], background=True, tools=[WEATHER]).json()
    return stream(pair[0], begun["id"])


def told(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(event["type"], event["sequence_number"], event.get("delta")) for event in events]


@pytest.mark.parametrize("paused_at", [1, 40])
def test_its_router_is_killed_and_another_one_streams_the_rest(
    pair: Pair, whole: list[dict[str, Any]], paused_at: int
) -> None:
    first, second = pair
    first.set(pause_at=paused_at)
    count = 2 if paused_at == 1 else 4
    response_id, seen = begin_stream(first, count)
    first.freeze()
    try:
        first.set(pause_at=None)
        rest = stream(second, response_id, after=seen[-1]["sequence_number"])
        assert told([*seen, *rest]) == told(whole)
        assert rest[-1]["type"] == "response.completed"
        final = rest[-1]["response"]
        assert final["id"] == response_id
        assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
        assert second.client.get(f"/v1/responses/{response_id}").json() == final
        follow_up = create(second, previous_response_id=response_id, input="and now?")
        assert follow_up.json()["status"] == "completed"
    finally:
        first.go_on()


def same(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without the prefill node's count of cached tokens, which only the first router received."""
    events[-1]["response"]["usage"]["input_tokens_details"] = {}
    return events


def test_two_routers_make_the_same_events(pair: Pair) -> None:
    first, second = pair
    first.set(pause_at=9)
    response_id, _ = begin_stream(first, 4)
    assert second.client.get(f"/v1/responses/{response_id}").json()["status"] == "in_progress"
    first.set(pause_at=None)
    assert same(stream(second, response_id)) == same(stream(first, response_id))


def test_one_that_ended_is_found_and_then_forgotten_everywhere(pair: Pair) -> None:
    first, second = pair
    response_id = create(first, background=True).json()["id"]
    done = stream(first, response_id)[-1]["response"]
    path = f"/v1/responses/{response_id}"
    assert second.client.get(path).json()["output"] == done["output"]
    assert second.client.delete(path).json()["deleted"]
    first.wait_for(lambda: not any(node.answers.recall(response_id)[0] for node in first.nodes.values()), "forgotten")
    assert second.client.get(path).status_code == 404


def test_another_router_cancels_it(pair: Pair) -> None:
    first, second = pair
    first.set(pause_at=9)
    response_id, _ = begin_stream(first, 4)
    path = f"/v1/responses/{response_id}"
    assert second.client.post(f"{path}/cancel").json()["status"] == "cancelled"
    until(lambda: first.client.get(path).json()["status"] == "cancelled")
    first.wait_for(first.idle, "nothing is left of it")


def test_its_node_is_lost_and_its_router_moves_it_while_another_one_reads(
    pair: Pair, whole: list[dict[str, Any]]
) -> None:
    first, second = pair
    first.set(pause_at=9)
    response_id, _ = begin_stream(first, 4)
    path = f"/v1/responses/{response_id}"
    assert second.client.get(path).json()["status"] == "in_progress"
    decoding = next(node for node in first.nodes.values() if node.answers.request_of(response_id))
    for router in pair:
        router.look(
            lambda router=router: router.server.set_members(  # type: ignore[misc]
                [node.info for node in first.nodes.values() if node is not decoding]
            )
        )
    decoding.kill()
    first.set(pause_at=None)
    assert told(stream(second, response_id)) == told(whole)


NO_NUMBER = WireError("invalid_logits", "the model computed no number")


def test_one_that_failed_says_so_elsewhere(pair: Pair) -> None:
    first, second = pair
    first.set(error_at=(3, NO_NUMBER))
    response_id = create(first, background=True).json()["id"]
    assert stream(first, response_id)[-1]["type"] == "response.failed"
    # The first router's word is on its way to the node, which knows only that the attempt was given up.
    failed_elsewhere(second, response_id)


def failed_elsewhere(router: RunningRouter, response_id: str) -> list[dict[str, Any]]:
    """Waits for that, and returns all that was seen."""
    seen: list[dict[str, Any]] = []

    def has_failed() -> bool:
        seen.append(router.client.get(f"/v1/responses/{response_id}").json())
        return bool(seen[-1]["status"] == "failed")

    until(has_failed)
    assert "no number" in seen[-1]["error"]["message"]
    return seen


def test_one_that_fails_at_prefill_nodes_alone_says_so_elsewhere(pair: Pair) -> None:
    """The decode nodes, which keep it, see each attempt only given up."""
    first, second = pair
    for node in first.nodes.values():
        if node.info.role is Role.PREFILL:
            node.set(error_at=(0, NO_NUMBER))
    body = {"input": "weather?", "background": True, "stream": True}
    with first.client.stream("POST", "/v1/responses", json=body) as events:
        failed = [event for line in events.iter_lines() for event in events_of(line)][-1]
    assert failed["type"] == "response.failed"
    # Until then the other router may think that it is moved to another node.
    *before, _ = failed_elsewhere(second, failed["response"]["id"])
    assert {each["status"] for each in before} <= {"queued", "in_progress"}


def test_a_router_that_is_stopped_leaves_it_to_the_nodes(pair: Pair, whole: list[dict[str, Any]]) -> None:
    first, second = pair
    first.set(pause_at=9)
    response_id, seen = begin_stream(first, 4)
    first.call(first.server.stop())
    first.set(pause_at=None)
    assert told([*seen, *stream(second, response_id, after=3)]) == told(whole)


def test_only_its_own_key_finds_it_elsewhere(start_router: StartRouter) -> None:
    keys = (ApiKey("a", "secret-a"), ApiKey("b", "secret-b"))
    first, second = two_routers(start_router, api_keys=keys, heartbeat=PATIENT)
    a, b = ({"authorization": f"Bearer {key.key}"} for key in keys)
    body = {"input": "x", "max_output_tokens": 2, "background": True}
    response_id = first.client.post("/v1/responses", json=body, headers=a).json()["id"]
    path = f"/v1/responses/{response_id}"
    assert second.client.get(path, headers=b).status_code == 404
    assert second.client.get(path, headers=a).json()["id"] == response_id
    assert second.client.get(f"/v1/responses/resp_{'0' * 48}", headers=a).status_code == 404
    assert second.client.get("/v1/responses/resp_x", headers=a).status_code == 404


def test_ids_that_are_made_up_flood_neither_the_nodes_nor_other_keys(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "MOST_QUESTIONS", 4)
    keys = (ApiKey("a", "secret-a"), ApiKey("b", "secret-b"))
    router = start_router(prefill=0, api_keys=keys, heartbeat=PATIENT)
    router.nodes["d0"].set(mute=True)  # so that questions stay open
    greedy, other = ({"authorization": f"Bearer {key.key}"} for key in keys)
    questions = router.wing(Responses).service.recalls.questions

    def ask(digit: int, key: dict[str, str]) -> socket.socket:
        connection = connect(router)
        head = f"GET /v1/responses/resp_{str(digit) * 48} HTTP/1.1\r\nhost: x\r\nauthorization: {key['authorization']}\r\n\r\n"
        connection.sendall(head.encode())
        return connection

    asked = [ask(digit, greedy) for digit in (1, 2)]
    router.wait_for(lambda: len(questions) == 2, "they are looked for")
    refused = router.client.get(f"/v1/responses/resp_{'3' * 48}", headers=greedy)
    assert "this key's part" in error_of(refused, 503)["message"]
    asked.append(ask(4, other))
    router.wait_for(lambda: len(questions) == 3, "the other key's is looked for")
    router.nodes["d0"].set(mute=False)
    for one in asked:
        one.close()


def test_a_node_that_says_nothing_is_not_waited_for(pair: Pair) -> None:
    first, second = pair
    response_id = create(first, background=True).json()["id"]
    done = stream(first, response_id)[-1]["response"]
    for node in first.nodes.values():
        if node.answers.recall(response_id)[0] is None:
            node.set(mute=True)
    assert second.client.get(f"/v1/responses/{response_id}").json()["output"] == done["output"]
