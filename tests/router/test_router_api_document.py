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
from tests.router.conftest import RunningRouter, StartRouter


@pytest.fixture
def router(start_router: StartRouter) -> RunningRouter:
    return start_router()


@pytest.fixture
def document(router: RunningRouter) -> dict[str, Any]:
    answer = router.client.get("/openapi.json")
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


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
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


def test_it_documents_what_there_is(router: RunningRouter, document: dict[str, Any]) -> None:
    asked = {"x-tandem-trace": "1", "x-request-id": "traced"}
    prompt = {"model": "fake", "prompt": "x", "max_tokens": 1}
    assert router.client.post("/v1/completions", json=prompt, headers=asked).status_code == 200
    kept = router.client.post("/v1/responses", json={"input": "x", "background": True}).json().get("id", "")
    for node in router.nodes.values():
        node.set(pause_at=0)  # what is asked for in a batch does not end
    batch_of = kept_batches(router)
    for path, verbs in document["paths"].items():
        for verb, about in verbs.items():
            named = path.replace("{model}", "fake").replace("{request_id}", "traced")
            named = named.replace("{response_id}", kept).replace("{file_id}", batch_of["file"])
            named = named.replace("{batch_id}", batch_of["messages" if "messages" in path else "batch"])
            answer = router.client.request(verb, named, json={} if verb == "post" else None)
            assert answer.status_code not in (404, 405), path
            assert str(answer.status_code) in about["responses"], (path, answer.status_code)


def test_the_document_has_the_version_of_the_server(document: dict[str, Any], router: RunningRouter) -> None:
    assert document["info"]["version"] == router.client.get("/version").json()["version"] == tandem.__version__


def test_probes_may_post_and_the_page_is_served(router: RunningRouter) -> None:
    assert router.client.post("/ping").status_code == 200
    page = router.client.get("/ui")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "<html" in page.text


def test_requests_are_documented_field_by_field(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for request in (CompletionRequest, ChatRequest):
        schema = schemas[request.__name__]
        assert set(schema["properties"]) == {*request.__struct_fields__, *ACCEPTED}
        assert schema["additionalProperties"] is False
    assert schemas["CompletionRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2


def test_real_answers_are_as_documented(router: RunningRouter) -> None:
    for fields in ({}, {"logprobs": 2, "echo": True}, {"n": 2}):
        msgspec.convert(router.complete(max_tokens=3, **fields).json(), Completion)
    for fields in ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}):
        msgspec.convert(router.chat(max_tokens=3, **fields).json(), ChatCompletion)
    options = {
        "stream": True,
        "max_tokens": 3,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    for path, expected, body in (
        ("/v1/completions", Completion, {"prompt": "x", "logprobs": 1}),
        (
            "/v1/chat/completions",
            ChatCompletionChunk,
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
        ),
    ):
        events = router.client.post(path, json={"model": "fake", **options, **body}).text.split("\n\n")
        bodies = [json.loads(event[6:]) for event in events if event and event != "data: [DONE]"]
        assert len(bodies) >= 2
        for one in bodies:
            msgspec.convert(one, expected)
            assert one["usage"]
    msgspec.convert(router.client.get("/v1/models").json(), ModelList)
    msgspec.convert(router.client.get("/health").json(), Health)
    msgspec.convert(router.client.get("/cluster").json(), ClusterDescription)
    msgspec.convert(router.client.post("/tokenize", json={"prompt": "x"}).json(), TokenizeResponse)
    msgspec.convert(router.client.post("/detokenize", json={"tokens": [5]}).json(), DetokenizeResponse)
    msgspec.convert(router.client.get("/nothing").json(), ErrorBody)


def test_the_page_to_try_it_needs_nothing_from_elsewhere(router: RunningRouter) -> None:
    page = router.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "https://" not in page.text
    assert "http://" not in page.text


def test_keys_are_documented_where_they_are_needed(start_router: StartRouter) -> None:
    from tandem.router.config import ApiKey

    document = start_router(api_keys=(ApiKey("a", "k"),)).client.get("/openapi.json").json()
    assert document["security"] == [{"key": []}]


def test_patterns_are_ones_that_a_json_schema_may_have(document: dict[str, Any]) -> None:
    """ECMA-262, which they are in, has no `\\Z`."""
    assert '"pattern": "' in (text := json.dumps(document))
    assert r"\\Z" not in text
