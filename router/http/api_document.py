"""The OpenAPI document, made from the types that requests are checked with, and the handler of the page to
try it."""

from __future__ import annotations

from typing import Any

import msgspec

import tandem
from tandem.api.anthropic.answer_types import MessageAnswer, MessagesError, TokenCount
from tandem.api.anthropic.messages_request import CountRequest, MessagesRequest
from tandem.api.field_table import ACCEPTED
from tandem.api.openai.answer_types import (
    ChatCompletion,
    ChatCompletionChunk,
    ClusterDescription,
    Completion,
    DetokenizeResponse,
    EmbeddingList,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    Ranking,
    RouterLoad,
    ScoreList,
    TokenizeResponse,
    Version,
)
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.completion_request import CompletionRequest
from tandem.api.openai.text_request import DetokenizeRequest, TokenizeRequest
from tandem.api.openai.vector_request import EmbeddingRequest, RerankRequest, ScoreRequest
from tandem.api.responses.answer_types import InputItems, InputTokens, ResponseAnswer, ResponseDeleted
from tandem.api.responses.responses_request import ResponsesRequest
from tandem.router.http.exchange import HttpExchange, send_bytes, send_page
from tandem.router.http.services import Services
from tandem.router.http.try_page import TRY_PAGE
from tandem.router.tracing.record import TraceList, TraceRecord

_TEXT_ERRORS = ("400", "401", "404", "408", "413", "415", "429", "431", "503")
_GENERATION_ERRORS = ("400", "401", "404", "408", "413", "415", "429", "431", "500", "502", "503", "504")
_EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["data", "event"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_TYPES: tuple[type[msgspec.Struct], ...] = (
    CompletionRequest, ChatRequest, ResponsesRequest, ResponseAnswer, ResponseDeleted, InputItems, InputTokens, MessagesRequest, CountRequest, MessageAnswer, TokenCount, MessagesError, TokenizeRequest, DetokenizeRequest, Completion, ChatCompletion,
    ChatCompletionChunk, ModelCard, ModelList, TokenizeResponse, DetokenizeResponse, Health, Version, RouterLoad, ErrorBody, ClusterDescription, TraceList,
    TraceRecord, EmbeddingRequest, EmbeddingList, ScoreRequest, ScoreList, RerankRequest, Ranking,
)  # fmt: skip


def make_document(keys_required: bool) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
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
        "paths": _paths_of_answers() | _paths_of_server(),
        "components": {"schemas": schemas},
    }
    if keys_required:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _paths_of_answers() -> dict[str, Any]:
    return {
        "/v1/completions": {
            "post": _generation("Complete a text", CompletionRequest, Completion, Completion),
        },
        "/v1/chat/completions": {
            "post": _generation("Answer a chat", ChatRequest, ChatCompletion, ChatCompletionChunk),
        },
        "/v1/embeddings": {
            "post": _operation("Make vectors of texts", EmbeddingRequest, EmbeddingList, _GENERATION_ERRORS)
        },
        "/v1/score": {
            "post": _operation("Compare texts by their vectors", ScoreRequest, ScoreList, _GENERATION_ERRORS)
        },
        "/v1/rerank": {
            "post": _operation(
                "Sort documents by their vectors' nearness to a query's",
                RerankRequest,
                Ranking,
                _GENERATION_ERRORS,
            )
        },
        "/v1/responses": {"post": _responses()},
        "/v1/responses/input_tokens": {
            "post": _operation(
                "Count the tokens of its prompt", ResponsesRequest, InputTokens, _GENERATION_ERRORS
            )
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _of_response("What it was asked with", InputItems)
        },
        "/v1/responses/{response_id}/cancel": {"post": _of_response("End it", ResponseAnswer)},
        "/v1/responses/{response_id}": {
            "get": _of_response("One that is kept, as it is now", ResponseAnswer),
            "delete": _of_response("Forget it", ResponseDeleted),
        },
        "/v1/messages": {
            "post": _messages("Answer a chat, as Anthropic's API does", MessagesRequest, MessageAnswer)
        },
        "/v1/messages/count_tokens": {
            "post": _messages("Count the tokens of a chat's prompt", CountRequest, TokenCount)
        },
    }


def _paths_of_server() -> dict[str, Any]:
    return {
        "/v1/models": {"get": _operation("The models that this server has", None, ModelList, ("401",))},
        "/v1/models/{model}": {
            "get": {
                **_operation("One of them", None, ModelCard, ("401", "404")),
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
            }
        },
        "/tokenize": {
            "post": _operation("Text to token ids", TokenizeRequest, TokenizeResponse, _TEXT_ERRORS)
        },
        "/detokenize": {
            "post": _operation("Token ids to text", DetokenizeRequest, DetokenizeResponse, _TEXT_ERRORS)
        },
        "/health": {"get": _health()},
        "/healthz": {"get": _health()},
        "/ping": {"get": _health()},
        "/live": {"get": _operation("Whether this process answers", None, Health, ())},
        "/version": {"get": _operation("This server's version", None, Version, ())},
        "/load": {"get": _operation("Requests that this router is working on", None, RouterLoad, ("401",))},
        "/metrics": {
            "get": {
                "summary": "Prometheus' metrics of the router and of every node",
                "responses": {"200": {"description": "as text", "content": {"text/plain": {}}}},
            }
        },
        "/cluster": {
            "get": _operation("Every node, as it reports itself", None, ClusterDescription, ("401", "403"))
        },
        "/traces": {"get": _operation("The last requests that were traced", None, TraceList, ("401",))},
        "/traces/{request_id}": {
            "get": {
                **_operation("Where one request's time went", None, TraceRecord, ("401", "404")),
                "parameters": [
                    {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
            }
        },
    }


def _ref(answer: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{answer.__name__}"}


def _json(answer: type[msgspec.Struct], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(answer)}}}


def _operation(
    summary: str,
    request: type[msgspec.Struct] | None,
    answer: type[msgspec.Struct],
    errors: tuple[str, ...],
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": _json(answer, "the answer"),
            **{status: _json(ErrorBody, "an error") for status in errors},
        },
    }
    if request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        }
    return operation


def _generation(
    summary: str,
    request: type[msgspec.Struct],
    whole: type[msgspec.Struct],
    event: type[msgspec.Struct],
) -> dict[str, Any]:
    operation = _operation(summary, request, whole, _GENERATION_ERRORS)
    operation["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": {
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
        },
    }
    return operation


def _messages(summary: str, request: type[msgspec.Struct], answer: type[msgspec.Struct]) -> dict[str, Any]:
    operation = _operation(summary, request, answer, _GENERATION_ERRORS)
    for status in _GENERATION_ERRORS:
        operation["responses"][status] = _json(MessagesError, "an error")
    if answer is MessageAnswer:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return operation


def _responses() -> dict[str, Any]:
    operation = _operation("Answer a chat with items", ResponsesRequest, ResponseAnswer, _GENERATION_ERRORS)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return operation


def _of_response(summary: str, answer: type[msgspec.Struct]) -> dict[str, Any]:
    identifier = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {**_operation(summary, None, answer, ("400", "401", "404")), "parameters": [identifier]}


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


async def try_page(services: Services, exchange: HttpExchange) -> None:
    await send_page(exchange.send, TRY_PAGE.encode())
