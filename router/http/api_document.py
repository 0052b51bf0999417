"""The OpenAPI document, made from the types that requests are checked with, and the handler of the page to
try it."""

from __future__ import annotations

from typing import Any

import msgspec

import tandem
from tandem.api.field_table import ACCEPTED
from tandem.api.openai.answer_types import (
    ChatCompletion,
    ChatCompletionChunk,
    ClusterDescription,
    Completion,
    DetokenizeResponse,
    Health,
    ModelCard,
    ModelList,
    RouterLoad,
    TokenizeResponse,
    Version,
)
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.completion_request import CompletionRequest
from tandem.api.openai.text_request import DetokenizeRequest, TokenizeRequest
from tandem.router.http.exchange import HttpExchange, send_bytes, send_page
from tandem.router.http.operation import ApiOperation
from tandem.router.http.services import Services
from tandem.router.http.try_page import page_with
from tandem.router.wings import wing_types

_TEXT_ERRORS = ("400", "401", "404", "408", "413", "415", "429", "431", "503")
_HELLO = [{"role": "user", "content": "Hello!"}]
# fmt: off
_ANSWERS = (
    ApiOperation(
        "post", "/v1/completions", "Complete a text", Completion, CompletionRequest, event=Completion,
        example={"prompt": "Once upon a time", "max_tokens": 60, "stream": True},
    ),
    ApiOperation(
        "post", "/v1/chat/completions", "Answer a chat", ChatCompletion, ChatRequest, event=ChatCompletionChunk,
        example={"messages": _HELLO, "max_tokens": 60, "stream": True},
    ),
)
_OF_SERVER = (
    ApiOperation("get", "/v1/models", "The models that this server has", ModelList, errors=("401",)),
    ApiOperation("get", "/v1/models/{model}", "One of them", ModelCard, errors=("401", "404")),
    ApiOperation(
        "post", "/tokenize", "Text to token ids", TokenizeResponse, TokenizeRequest, _TEXT_ERRORS,
        example={"prompt": "Hello!"},
    ),
    ApiOperation(
        "post", "/detokenize", "Token ids to text", DetokenizeResponse, DetokenizeRequest, _TEXT_ERRORS,
        example={"tokens": [1, 2, 3]},
    ),
    *(
        ApiOperation("get", path, "Whether a request would be served now", Health, errors=("503",), error=Health)
        for path in ("/health", "/healthz", "/ping")
    ),
    ApiOperation("get", "/live", "Whether this process answers", Health, errors=()),
    ApiOperation("get", "/version", "This server's version", Version, errors=()),
    ApiOperation("get", "/load", "Requests that this router is working on", RouterLoad, errors=("401",)),
    ApiOperation("get", "/cluster", "Every node, as it reports itself", ClusterDescription, errors=("401", "403")),
)
# fmt: on
_METRICS = {
    "summary": "Prometheus' metrics of the router and of every node",
    "responses": {"200": {"description": "as text", "content": {"text/plain": {}}}},
}


def _operations() -> list[ApiOperation]:
    return [*_ANSWERS, *(each for wing in wing_types() for each in wing.operations), *_OF_SERVER]


def make_document(keys_required: bool) -> dict[str, Any]:
    types = dict.fromkeys(each for operation in _operations() for each in operation.types)
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for request in ("CompletionRequest", "ChatRequest"):
        for name, why in ACCEPTED.items():
            schemas[request]["properties"][name] = {"description": f"Accepted, without effect: {why}."}
    paths: dict[str, Any] = {}
    for operation in _operations():
        paths.setdefault(operation.path, {})[operation.method] = operation.described
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": tandem.__version__,
            "description": "OpenAI's API, served by separate prefill and decode nodes.",
        },
        "paths": {**paths, "/metrics": {"get": _METRICS}},
        "components": {"schemas": schemas},
    }
    if keys_required:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


_documents: dict[bool, bytes] = {}


async def document(services: Services, exchange: HttpExchange) -> None:
    required = services.keys.required
    if required not in _documents:
        _documents[required] = msgspec.json.encode(make_document(required))
    await send_bytes(exchange.send, _documents[required], b"application/json")


def examples() -> dict[str, Any]:
    """Returns the body that the form of each path on /docs begins with."""
    return {each.path: each.example for each in _operations() if each.example is not None}


async def try_page(services: Services, exchange: HttpExchange) -> None:
    await send_page(exchange.send, page_with(examples()).encode())
