"""POST /tokenize, /detokenize and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.router.anthropic.messages_request import CountRequest, as_chat
from tandem.router.formats.lark import JsonObject
from tandem.router.http.body import read_body
from tandem.router.http.exchange import HttpExchange, send_pieces
from tandem.router.http.services import Services
from tandem.router.openai.answer import json_pieces
from tandem.router.openai.chat_request import ChatMessage, Tool
from tandem.router.openai.fields import TokenId
from tandem.router.openai.prompts import (
    ChatPrompt,
    ServedModel,
    chat_prompt,
    check_images,
    render_chat,
    with_images,
)
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
def _counted(exchange: HttpExchange) -> Iterator[None]:
    """Counts a request for its key before it is read. It uses none of the key's tokens, because nothing is
    generated."""
    tenant = exchange.tenant
    if tenant is None:
        yield
        return
    reservation = tenant.enter(generates=False)
    try:
        yield
        reservation.settle(0, [])
    finally:
        reservation.void()


async def tokenize(services: Services, exchange: HttpExchange) -> None:
    with _counted(exchange), services.bodies.share() as share:
        request = await read_body(exchange, TokenizeRequest, services.config, share)
        services.model.check_name(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("prompt: either prompt or messages must be given, and not both", "prompt")
        answer = await _tokenized(services.model, request)
    await send_pieces(exchange.send, json_pieces(answer))


async def _tokenized(model: ServedModel, request: TokenizeRequest) -> dict[str, Any]:
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        ids = await model.tokenizer.encode_async(request.prompt, special=special)
    else:
        prompt = await _rendered(model, request)
        ids = await model.tokenizer.encode_async(prompt.text, special=bool(request.add_special_tokens))
    pieces = await asyncio.to_thread(_pieces, ids, model.tokenizer) if request.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "tokens": ids,
        "token_strs": pieces,
    }


async def _rendered(model: ServedModel, request: TokenizeRequest) -> ChatPrompt:
    if model.template is None or request.messages is None:
        raise InvalidRequest("messages: this model has no chat template", "messages")
    check_images(request.messages, model)
    continues = bool(request.continue_final_message)
    text = await render_chat(
        model.template,
        model.guard,
        request.messages,
        request.tools,
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        extra=request.chat_template_kwargs,
    )
    return await with_images(text, request.messages, model)


def _pieces(token_ids: list[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]


async def detokenize(services: Services, exchange: HttpExchange) -> None:
    with _counted(exchange), services.bodies.share() as share:
        request = await read_body(exchange, DetokenizeRequest, services.config, share)
        model = services.model
        model.check_name(request.model)
        unknown = model.tokenizer.first_unknown(request.tokens)
        if unknown is not None:
            size = model.tokenizer.vocab_size
            raise InvalidRequest(f"tokens: {unknown} is outside the vocabulary of {size} tokens", "tokens")
        prompt = await model.tokenizer.decode_async(request.tokens)
    await send_pieces(exchange.send, json_pieces({"prompt": prompt}))


async def count_tokens(services: Services, exchange: HttpExchange) -> None:
    """Counts the tokens of a chat's prompt, for Anthropic's clients."""
    with _counted(exchange), services.bodies.share() as share:
        request = await read_body(exchange, CountRequest, services.config, share)
        services.model.check_name(request.model)
        prompt = await chat_prompt(as_chat(request), services.model)
        ids = await services.model.tokenizer.encode_async(prompt.text, special=False)
    await send_pieces(exchange.send, json_pieces({"input_tokens": len(ids)}))
