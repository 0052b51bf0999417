"""OpenAI's Responses API: its own client, unchanged; answers that are kept, followed again, and cancelled."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.api.responses import response_store
from tandem.api.responses.response_store import RESPONSE_BYTES, ResponseStore, StoredResponse, StoreFull
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import WireError
from tandem.router.config import ApiKey, Heartbeat, Limits
from tandem.router.responses.wing import Responses
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_node import scripted
from tests.small_model import HERMES, PARIS, THOUGHT

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "the weather somewhere",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nI look.\n{HERMES}"


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter, thinking_folder: str, tokenizer: Tokenizer, end_token: int) -> RunningRouter:
    script = [*tokenizer.encode(TEXT, special=False), end_token]
    patient = Heartbeat(ping_interval=0.1, silence=5)
    return keep_router(rule=scripted(script), tokenizer_path=thinking_folder, heartbeat=patient)


def create(router: RunningRouter, **fields: Any) -> Any:
    return router.client.post("/v1/responses", json={"input": "weather?"} | fields)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_a_tool_loop_through_the_official_client(router: RunningRouter) -> None:
    client = router.official_client()
    first = client.responses.create(model="fake", input="weather?", tools=[WEATHER], instructions="Be brief.")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text.strip() == "I look."
    thought, _, call = first.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == THOUGHT
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == PARIS
    assert first.status == "completed"
    assert first.usage is not None
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    assert first.usage.input_tokens == len(router.nodes["p0"].submits[-1].prompt_token_ids)

    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model="fake", input=[answer], previous_response_id=first.id, tools=[WEATHER])
    prompt = router.prompt
    assert prompt.index("weather?") < prompt.index('"arguments": {"city": "Paris"}') < prompt.index("rain")
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output == first.output
    client.responses.delete(first.id)
    assert router.client.get(f"/v1/responses/{first.id}").status_code == 404

    history: Any = [{"role": "user", "content": "weather?"}, *first.output, answer]
    client.responses.create(model="fake", input=history, tools=[WEATHER])
    assert router.prompt == prompt


def test_a_stream_is_the_whole_answer_in_numbered_events(router: RunningRouter) -> None:
    client = router.official_client()
    with client.responses.stream(model="fake", input="weather?", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    call = final.output[2]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == PARIS[1]
    kinds = [event.type for event in events]
    # What comes at once may be one delta.
    assert kinds.count("response.function_call_arguments.delta") >= 1
    assert kinds.count("response.reasoning_text.delta") >= 1
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3


def test_a_call_that_a_stop_string_cut_off_is_incomplete(router: RunningRouter) -> None:
    for stop, status in (('ris"', "incomplete"), ("</tool", "completed")):
        call = create(router, tools=[WEATHER], stop=stop).json()["output"][-1]
        assert (call["type"], call["status"]) == ("function_call", status)


def test_a_schema_and_an_answer_that_is_cut_off(router: RunningRouter) -> None:
    form = {"type": "json_schema", "name": "p", "schema": {"type": "object"}}
    body = create(router, text={"format": form}, max_output_tokens=4).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert "%json" in (router.nodes["p0"].submits[-1].sampling.grammar or "")
    assert create(router, reasoning={"effort": "none"}, max_output_tokens=4).status_code == 200
    assert router.prompt.endswith("</think>\n\n")


def test_a_chats_extensions_reach_the_engine(router: RunningRouter) -> None:
    extra = {"ignore_eos": True, "min_tokens": 2, "top_k": 5, "seed": 3, "stop": ["zz"], "cache_salt": "mine"}
    assert create(router, **extra, max_output_tokens=9, priority=2).status_code == 200
    submitted = router.nodes["p0"].submits[-1]
    sampling = submitted.sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.top_k, sampling.seed) == (True, 2, 5, 3)
    assert submitted.priority == 2
    create(router)
    assert router.nodes["p0"].submits[-1].cache_salt != submitted.cache_salt


def test_in_the_background_and_taken_up_again(router: RunningRouter) -> None:
    node = router.nodes["d0"]
    node.set(pause_at=10)
    begun = create(router, background=True).json()
    assert begun["status"] in ("queued", "in_progress")
    path = f"/v1/responses/{begun['id']}"
    store = router.wing(Responses).service.store
    # Ten tokens may come in one portion, and then they are one delta.
    router.wait_for(lambda: len(store.find(begun["id"], "").events) > 3, "some events")
    assert router.client.get(path).json()["status"] == "in_progress"

    seen: list[dict[str, Any]] = []
    with router.client.stream("GET", path, params={"stream": "true"}) as stream:
        for line in stream.iter_lines():
            seen += events_of(line)
            if len(seen) == 4:
                break  # the connection is lost
    node.resume()
    rest = events_of(router.client.get(path, params={"stream": "true", "starting_after": 3}).text)
    numbers = [event["sequence_number"] for event in [*seen[:4], *rest]]
    assert numbers == list(range(len(numbers)))
    assert rest[-1]["type"] == "response.completed"
    again = events_of(router.client.get(path, params={"stream": "true"}).text)
    assert again[4:] == rest
    assert router.client.get(path).json() == rest[-1]["response"]


def test_one_in_the_background_is_cancelled(router: RunningRouter) -> None:
    router.nodes["d0"].set(pause_at=5)
    begun = create(router, background=True).json()
    path = f"/v1/responses/{begun['id']}"
    store = router.wing(Responses).service.store
    router.wait_for(lambda: len(store.find(begun["id"], "").events) > 1, "it is being written")
    assert router.client.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert router.client.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert router.client.get(path).json()["status"] == "cancelled"
    router.wait_for(router.idle, "nothing is left of it")
    router.nodes["d0"].resume()
    foreground = create(router).json()
    assert router.client.post(f"/v1/responses/{foreground['id']}/cancel").status_code == 400


def test_a_client_that_goes_away_takes_its_response_with_it(router: RunningRouter) -> None:
    router.nodes["d0"].set(pause_at=5)
    with router.client.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as stream:
        next(stream.iter_lines())
    router.wait_for(router.idle, "it was cancelled")


def test_what_a_client_has_read_of_a_stream_takes_no_memory(router: RunningRouter) -> None:
    router.nodes["d0"].set(pause_at=60)
    store, placement = router.wing(Responses).service.store, router.server.services.dispatcher.placement
    before = store.size
    with router.client.stream("POST", "/v1/responses", json={"input": "weather?", "stream": True}) as stream:
        router.wait_for(lambda: sum(len(life.ledger.tokens) for life in placement.lives.all()) == 60, "the node waits")
        router.wait_for(lambda: store.size < before + RESPONSE_BYTES + 2000, "no event is kept")
        router.nodes["d0"].resume()
        events = events_of(stream.read().decode())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"


def test_a_failure_is_a_status_or_an_event(start_router: StartRouter) -> None:
    router = start_router()
    router.set(refuse=WireError("unavailable", "no room"))
    assert create(router).status_code in (502, 503)
    assert create(router, stream=True).status_code in (502, 503)
    path = f"/v1/responses/{create(router, background=True).json()['id']}"
    router.wait_for(lambda: router.server.services.dispatcher.running == 0, "it has ended")
    events = events_of(router.client.get(path, params={"stream": "true"}).text)
    assert events[-1]["type"] == "response.failed"
    assert router.client.get(path).json()["error"]["message"]


def test_what_is_kept_is_bounded_and_each_keys_own(start_router: StartRouter) -> None:
    keys = (ApiKey("a", "secret-a"), ApiKey("b", "secret-b"))
    router = start_router(api_keys=keys, limits=Limits(responses_bytes=6_000 + 6 * RESPONSE_BYTES))

    def made(**fields: Any) -> str:
        name: str = router.ask("/v1/responses", "secret-a", input="x", max_output_tokens=2, **fields).json()["id"]
        return name

    def found(name: str, key: str = "secret-a") -> int:
        return router.client.get(f"/v1/responses/{name}", headers={"authorization": f"Bearer {key}"}).status_code

    names = [made() for _ in range(12)]
    assert (found(names[-1]), found(names[-1], "secret-b"), found(names[0])) == (200, 404, 404)
    assert found(made(store=False)) == 404


def test_what_is_wrong_is_named(router: RunningRouter) -> None:
    image = {"type": "input_image", "image_url": "data:,"}
    for fields, param in (
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [image]}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_none"}, None),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ):
        answer = create(router, **fields)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param
    router.wait_for(router.idle, "nothing was begun")


def test_a_refusal_of_the_chat_names_what_the_client_wrote(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = router.nodes["p0"].info.max_model_len
    long = create(router, input="word " * context).json()["error"]
    assert (long["param"], long["message"].partition(":")[0]) == ("input", "input")
    much = create(router, max_output_tokens=context).json()["error"]
    assert much["param"] == "max_output_tokens"
    assert "tokens of input are" in much["message"]
    monkeypatch.setattr(router.server.services.model, "template", None)
    none = create(router).json()["error"]
    assert none["param"] == "input"
    assert none["message"] == "input: this model has no chat template; send a prompt to /v1/completions"


def stored(index: int, text: str = "x" * 100, owner: str = "alice", **body: Any) -> StoredResponse:
    shown = {"id": f"resp_{index}", "status": "in_progress", "output": [], "text": text, **body}
    return StoredResponse(shown, owner, [], keeps_events=False)


class Untraversable(OrderedDict[str, StoredResponse]):
    """Refuses to be walked through to its end, however that is done."""

    def values(self) -> Any:
        yield from islice(super().values(), 1)
        raise AssertionError("the store walks through all that it keeps")

    def items(self) -> Any:
        raise AssertionError("the store walks through all that it keeps")


def test_a_response_costs_the_same_beside_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "OrderedDict", Untraversable)
    each = stored(1_000_000).size
    store = ResponseStore(1000 * each + each // 2)
    for index in range(1000):
        one = stored(1_000_000 + index)
        store.add(one)
        one.end()
    first = store.find("resp_1000000", "alice")
    assert first is not None
    for index in range(2, 5):
        one = stored(1_000_000 + 1000 * index)
        store.add(one)
        one.add([b"e" * 50])
        one.end()
        store.settle()
        assert store.size <= 1000 * each + each // 2
    assert store.find("resp_1000000", "alice") is first, "what was used last stays longest"
    assert store.find("resp_1000001", "alice") is None


def test_a_key_that_stores_much_pushes_out_its_own() -> None:
    each = stored(0).size
    store = ResponseStore(10 * each)
    for index, owner in enumerate(["bob", *["alice"] * 30, "bob"]):
        one = stored(index, owner=owner)
        store.add(one)
        one.end()
        store.settle()
    assert store.find("resp_0", "bob") is not None
    assert store.find("resp_1", "alice") is None


def test_a_key_that_writes_much_leaves_room_for_others() -> None:
    each = stored(0).size
    store = ResponseStore(10 * each)
    for index in range(5):
        store.add(stored(index))
    with pytest.raises(StoreFull, match="this key's part"):
        store.add(stored(5))
    store.add(stored(6, owner="bob"))


@given(st.lists(st.tuples(st.sampled_from("adegs"), st.integers(0, 5), st.integers(0, 300)), max_size=40))
def test_the_stores_size_is_that_of_what_it_keeps(steps: list[tuple[str, int, int]]) -> None:
    store = ResponseStore(2000 + 3 * RESPONSE_BYTES)
    kept: dict[str, StoredResponse] = {}
    made: list[StoredResponse] = []
    for what, index, size in steps:
        one = kept.get(f"resp_{index}")
        if what == "a":
            kept[f"resp_{index}"] = one = stored(index, "y" * size)
            made.append(one)
            with contextlib.suppress(StoreFull):
                store.add(one)
        elif one is None:
            continue
        elif what == "d":
            store.drop(one)
        elif what == "e":
            one.end()
        elif what == "g":
            one.add([b"g" * size])
        else:
            store.settle()
        assert store.size == sum(response.size for response in made if response.store is store)
    left = [response for response in made if response.store is store]
    assert all(store.find(response.id, "alice") is response for response in left)
