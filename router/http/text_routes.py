"""POST /tokenize, /detokenize and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from tandem.router.anthropic.messages_request import CountRequest, as_chat
from tandem.router.formats.lark import JsonObject
from tandem.router.http.body import read_body
from tandem.router.http.gate import exchange_of
from tandem.router.http.memory import BodyShare
from tandem.router.http.respond import send_pieces
from tandem.router.http.services import Services
from tandem.router.openai.chat_prompt import render_chat
from tandem.router.openai.chat_request import ChatMessage, Tool
from tandem.router.openai.fields import TokenId
from tandem.router.openai.pieces import json_pieces
from tandem.router.openai.plan import chat_prompt
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.errors import InvalidRequest


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


@contextmanager
def _counted(scope: Scope) -> Iterator[None]:
    """One of its key's requests, from before it is read. It uses none of its tokens: nothing is generated."""
    tenant = exchange_of(scope).tenant
    if tenant is None:
        yield
        return
    reservation = tenant.enter(generates=False)
    try:
        yield
        reservation.settle(0, [])
    finally:
        reservation.void()


class TokenizeRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _counted(scope), self._services.bodies.share() as share:
            request = await self._read(scope, receive, share)
            answer = await self._answer(request)
        await send_pieces(send, json_pieces(answer))

    async def _read(self, scope: Scope, receive: Receive, share: BodyShare) -> TokenizeRequest:
        services = self._services
        request = await read_body(scope, receive, TokenizeRequest, services.config, share)
        services.model.check_name(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("prompt: either prompt or messages must be given, and not both", "prompt")
        return request

    async def _answer(self, request: TokenizeRequest) -> dict[str, Any]:
        model = self._services.model
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            ids = await model.tokenizer.encode_async(request.prompt, special=special)
        else:
            ids = await model.tokenizer.encode_async(
                await self._render(request), special=bool(request.add_special_tokens)
            )
        pieces = await asyncio.to_thread(_pieces, ids, model.tokenizer) if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": ids,
            "token_strs": pieces,
        }

    async def _render(self, request: TokenizeRequest) -> str:
        template = self._services.model.template
        if template is None or request.messages is None:
            raise InvalidRequest("messages: this model has no chat template", "messages")
        continues = bool(request.continue_final_message)
        return await render_chat(
            template,
            request.messages,
            request.tools,
            add_generation_prompt=not continues and request.add_generation_prompt is not False,
            continue_final_message=continues,
            extra=request.chat_template_kwargs,
        )


def _pieces(token_ids: list[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]


class DetokenizeRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _counted(scope), self._services.bodies.share() as share:
            tokens = await self._read(scope, receive, share)
            prompt = await self._services.model.tokenizer.decode_async(tokens)
        await send_pieces(send, json_pieces({"prompt": prompt}))

    async def _read(self, scope: Scope, receive: Receive, share: BodyShare) -> list[int]:
        services, model = self._services, self._services.model
        request = await read_body(scope, receive, DetokenizeRequest, services.config, share)
        model.check_name(request.model)
        unknown = model.tokenizer.first_unknown(request.tokens)
        if unknown is not None:
            size = model.tokenizer.vocab_size
            raise InvalidRequest(f"tokens: {unknown} is outside the vocabulary of {size} tokens", "tokens")
        return request.tokens


class CountTokensRoute:
    """How many tokens a chat's prompt has, asked as Anthropic's clients ask."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        with _counted(scope), services.bodies.share() as share:
            request = await read_body(scope, receive, CountRequest, services.config, share)
            services.model.check_name(request.model)
            prompt = await chat_prompt(as_chat(request), services.model)
            ids = await services.model.tokenizer.encode_async(prompt, special=False)
        await send_pieces(send, json_pieces({"input_tokens": len(ids)}))
