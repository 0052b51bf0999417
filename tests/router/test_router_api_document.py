from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import tandem
from tandem.api.field_table import ACCEPTED
from tandem.api.openai.answer_types import (
    ChatCompletion,
    ChatCompletionChunk,
    ClusterDescription,
    Completion,
    DetokenizeResponse,
    ErrorBody,
    Health,
    ModelList,
    TokenizeResponse,
)
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.completion_request import CompletionRequest
from tandem.router.config import ApiKey
from tests.router.conftest import RunningRouter, StartRouter


@pytest.fixture(scope="module")
def document(kept_router: RunningRouter) -> dict[str, Any]:
    answer = kept_router.client.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_reference_leads_somewhere(router: RunningRouter) -> None:
    document = router.client.get("/openapi.json").json()
    found = set(references(document))
    assert found
    for reference in found:
        name = re.fullmatch(r"#/components/schemas/(\w+)", reference)
        assert name is not None, reference
        assert name[1] in document["components"]["schemas"]


def kept_batches(router: RunningRouter) -> dict[str, str]:
    """A file, and a batch of either kind; empty names where there are none."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    file = router.client.post(
        "/v1/files", files={"file": ("in.jsonl", json.dumps(line).encode())}, data={"purpose": "batch"}
    )
    asked = {"input_file_id": file.json().get("id", ""), "endpoint": "/v1/completions"}
    message = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    messages = {"requests": [{"custom_id": "a", "params": message}]}
    batch, messages_batch = (
        router.client.post(path, json=body).json().get("id", "")
        for path, body in (("/v1/batches", asked), ("/v1/messages/batches", messages))
    )
    return {"file": file.json().get("id", ""), "batch": batch, "messages": messages_batch}


def test_it_documents_what_there_is(start_router: StartRouter, document: dict[str, Any]) -> None:
    router = start_router()
    asked = {"x-tandem-trace": "1", "x-request-id": "traced"}
    prompt = {"model": "fake", "prompt": "x", "max_tokens": 1}
    assert router.client.post("/v1/completions", json=prompt, headers=asked).status_code == 200
    kept = router.client.post("/v1/responses", json={"input": "x", "background": True}).json().get("id", "")
    router.set(pause_at=0)  # what is asked for in a batch does not end
    batch_of = kept_batches(router)
    for path, verbs in document["paths"].items():
        for verb, about in verbs.items():
            named = path.replace("{model}", "fake").replace("{request_id}", "traced")
            named = named.replace("{response_id}", kept).replace("{file_id}", batch_of["file"])
            named = named.replace("{batch_id}", batch_of["messages" if "messages" in path else "batch"])
            answer = router.client.request(verb, named, json={} if verb == "post" else None)
            assert answer.status_code not in (404, 405), path
            assert str(answer.status_code) in about["responses"], (path, answer.status_code)


def test_pages_and_versions(document: dict[str, Any], router: RunningRouter) -> None:
    assert document["info"]["version"] == router.client.get("/version").json()["version"] == tandem.__version__
    pages = {path: router.client.get(path) for path in ("/ui", "/docs")}
    for page in pages.values():
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "<html" in page.text
    assert "://" not in pages["/docs"].text, "it needs nothing from elsewhere"


def test_requests_are_documented_field_by_field(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for request in (CompletionRequest, ChatRequest):
        schema = schemas[request.__name__]
        assert set(schema["properties"]) == {*request.__struct_fields__, *ACCEPTED}
        assert schema["additionalProperties"] is False
    assert schemas["CompletionRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2


def test_real_answers_are_as_documented(router: RunningRouter) -> None:
    chat, completion = ChatCompletion, Completion
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        *((router.complete, completion, fields) for fields in ({}, {"logprobs": 2, "echo": True}, {"n": 2})),
        *((router.chat, chat, fields) for fields in ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 2})),
    ]
    for ask, kind, fields in cases:
        msgspec.convert(ask(max_tokens=3, **fields).json(), kind)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for ask, kind, logprobs in ((router.complete, completion, 1), (router.chat, ChatCompletionChunk, True)):
        events = ask(stream=True, max_tokens=3, stream_options=usage, logprobs=logprobs).text.split("\n\n")
        bodies = [json.loads(event[6:]) for event in events if event and event != "data: [DONE]"]
        assert len(bodies) >= 2
        for one in bodies:
            msgspec.convert(one, kind)
            assert one["usage"]
    for path, kind in (
        ("/v1/models", ModelList),
        ("/health", Health),
        ("/cluster", ClusterDescription),
        ("/nothing", ErrorBody),
    ):
        msgspec.convert(router.client.get(path).json(), kind)
    msgspec.convert(router.ask("/tokenize", prompt="x").json(), TokenizeResponse)
    msgspec.convert(router.ask("/detokenize", tokens=[5]).json(), DetokenizeResponse)


def test_keys_are_documented_where_they_are_needed(start_router: StartRouter) -> None:
    document = start_router(api_keys=(ApiKey("a", "k"),)).client.get("/openapi.json").json()
    assert document["security"] == [{"key": []}]


def test_patterns_are_ones_that_a_json_schema_may_have(document: dict[str, Any]) -> None:
    """ECMA-262, which they are in, has no `\\Z`."""
    assert '"pattern": "' in (text := json.dumps(document))
    assert r"\\Z" not in text
