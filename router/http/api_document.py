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
    ErrorBody,
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
from tandem.router.http.services import Services
from tandem.router.http.try_page import EXAMPLES, page_with
from tandem.router.wings import wing_types

_TEXT_ERRORS = ("400", "401", "404", "408", "413", "415", "429", "431", "503")
GENERATION_ERRORS = ("400", "401", "404", "408", "413", "415", "429", "431", "500", "502", "503", "504")
EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["data", "event"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_TYPES: tuple[type[msgspec.Struct], ...] = (
    CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, Completion, ChatCompletion,
    ChatCompletionChunk, ModelCard, ModelList, TokenizeResponse, DetokenizeResponse, Health, Version, RouterLoad, ErrorBody, ClusterDescription,
)  # fmt: skip


def make_document(keys_required: bool) -> dict[str, Any]:
    parts = [wing.document for wing in wing_types()]
    types = [*_TYPES, *(each for part in parts for each in part.types)]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for request in ("CompletionRequest", "ChatRequest"):
        for name, why in ACCEPTED.items():
            schemas[request]["properties"][name] = {"description": f"Accepted, without effect: {why}."}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": tandem.__version__,
            "description": "OpenAI's API, served by separate prefill and decode nodes.",
        },
        "paths": {
            **_paths_of_answers(),
            **{path: about for part in parts for path, about in part.paths.items()},
            **_paths_of_server(),
        },
        "components": {"schemas": schemas},
    }
    if keys_required:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _paths_of_answers() -> dict[str, Any]:
    return {
        "/v1/completions": {
            "post": operation(
                "Complete a text", CompletionRequest, Completion, GENERATION_ERRORS, event=_delta(Completion)
            )
        },
        "/v1/chat/completions": {
            "post": operation(
                "Answer a chat", ChatRequest, ChatCompletion, GENERATION_ERRORS, event=_delta(ChatCompletionChunk)
            )
        },
    }


def _paths_of_server() -> dict[str, Any]:
    return {
        "/v1/models": {"get": operation("The models that this server has", None, ModelList, ("401",))},
        "/v1/models/{model}": {"get": operation("One of them", None, ModelCard, ("401", "404"), parameter="model")},
        "/tokenize": {"post": operation("Text to token ids", TokenizeRequest, TokenizeResponse, _TEXT_ERRORS)},
        "/detokenize": {"post": operation("Token ids to text", DetokenizeRequest, DetokenizeResponse, _TEXT_ERRORS)},
        "/health": {"get": _health()},
        "/healthz": {"get": _health()},
        "/ping": {"get": _health()},
        "/live": {"get": operation("Whether this process answers", None, Health, ())},
        "/version": {"get": operation("This server's version", None, Version, ())},
        "/load": {"get": operation("Requests that this router is working on", None, RouterLoad, ("401",))},
        "/metrics": {
            "get": {
                "summary": "Prometheus' metrics of the router and of every node",
                "responses": {"200": {"description": "as text", "content": {"text/plain": {}}}},
            }
        },
        "/cluster": {"get": operation("Every node, as it reports itself", None, ClusterDescription, ("401", "403"))},
    }


def _ref(answer: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{answer.__name__}"}


def _json(answer: type[msgspec.Struct], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(answer)}}}


def operation(
    summary: str,
    request: type[msgspec.Struct] | None,
    answer: type[msgspec.Struct],
    errors: tuple[str, ...],
    *,
    error: type[msgspec.Struct] = ErrorBody,
    event: dict[str, Any] | None = None,
    parameter: str | None = None,
) -> dict[str, Any]:
    """One method at one path. `event`: the schema of an event, if it streams. `parameter`: the variable part of the path."""
    made: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": _json(answer, "the answer"), **{status: _json(error, "an error") for status in errors}},
    }
    if request is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    if event is not None:
        made["responses"]["200"]["content"]["text/event-stream"] = {"schema": event}
    if parameter is not None:
        made["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    return made


def _delta(event: type[msgspec.Struct]) -> dict[str, Any]:
    """Describes an event of OpenAI's streams."""
    return {
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {
                "anyOf": [
                    {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": {"anyOf": [_ref(event), _ref(ErrorBody)]},
                    },
                    {"const": "[DONE]"},
                ],
                "description": "with stream: one of these per event, [DONE] at the end; an error ends it without",
            },
            "event": {"type": "string", "enum": ["message", "error"]},
        },
    }


def _health() -> dict[str, Any]:
    return {
        "summary": "Whether a request would be served now",
        "responses": {"200": _json(Health, "yes"), "503": _json(Health, "no, and why")},
    }


_documents: dict[bool, bytes] = {}


async def document(services: Services, exchange: HttpExchange) -> None:
    required = services.keys.required
    if required not in _documents:
        _documents[required] = msgspec.json.encode(make_document(required))
    await send_bytes(exchange.send, _documents[required], b"application/json")


def examples() -> dict[str, Any]:
    """Returns the body that the form of each path on /docs begins with."""
    return EXAMPLES | {path: body for wing in wing_types() for path, body in wing.document.examples.items()}


async def try_page(services: Services, exchange: HttpExchange) -> None:
    await send_page(exchange.send, page_with(examples()).encode())
