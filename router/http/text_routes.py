"""POST /tokenize and /detokenize, and what counting a prompt's tokens shares with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tandem.api.openai.answer import json_pieces
from tandem.api.openai.chat_prompt import TemplateInput, chat_prompt, template_variables, tools_to_call
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.prompts import encoded, long_texts, prompt_ids
from tandem.api.openai.served_model import ServedModel
from tandem.api.openai.text_request import DetokenizeRequest, TokenizeRequest
from tandem.api.text.tenant_cache import CacheOwner
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import DeadlineExceeded, InvalidRequest
from tandem.router.http.body import TOKEN_BYTES, read_body
from tandem.router.http.exchange import HttpExchange, send_pieces
from tandem.router.http.services import Services
from tandem.router.keys import Reservation


@contextmanager
def counted(exchange: HttpExchange) -> Iterator[None]:
    """Counts a request for its key before it is read. It uses none of the key's tokens, because nothing is
    generated."""
    tenant = exchange.tenant
    with tenant.enter(generates=False) if tenant is not None else Reservation(None) as reservation:
        yield
        reservation.settle(0, [])


# What a token of an answer keeps besides the token itself: its name as a text of Python.
NAME_BYTES = 60
CHARACTER_BYTES = 4  # of a text, at most


@asynccontextmanager
async def timely(services: Services) -> AsyncIterator[None]:
    """Bounds the whole request, so that an answer which is read too slowly is cut off and keeps no memory."""
    total = services.config.timeouts.total
    try:
        async with asyncio.timeout(total):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the request took longer than router.timeouts.total allows") from None


def owner_of(exchange: HttpExchange) -> CacheOwner:
    salt = exchange.tenant.salted(None) if exchange.tenant is not None else ""
    return CacheOwner(salt, salt)


async def tokenize(services: Services, exchange: HttpExchange) -> None:
    async with timely(services):
        with counted(exchange):
            with services.bodies.share() as share:
                request = await read_body(exchange, TokenizeRequest, services.config, share)
                model = services.model
                model.check_name(request.model)
                if (request.prompt is None) == (request.messages is None):
                    raise InvalidRequest("prompt: either prompt or messages must be given, and not both", "prompt")
                ids = await _token_ids(model, request, owner_of(exchange))
            named = bool(request.return_token_strs)
            del request
            with services.kept.share(len(ids) * (TOKEN_BYTES + named * NAME_BYTES), exchange.owner):
                pieces: list[str] | None = None
                if named:
                    async with long_texts.turn(owner_of(exchange).tenant):
                        pieces = await asyncio.to_thread(_pieces, ids, model.tokenizer)
                answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": pieces}
                await send_pieces(exchange.send, json_pieces(answer))


async def _token_ids(model: ServedModel, request: TokenizeRequest, owner: CacheOwner) -> list[int]:
    """Returns the ids of a prompt or chat. What certainly exceeds the context is refused, as in a request that
    generates."""
    context = model.max_model_len
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        return await encoded(request.prompt, "prompt", model.tokenizer, context, special=special, owner=owner)
    chat = TemplateInput.of(request, request.tools, request.chat_template_kwargs)
    text, _ = await chat_prompt(model, chat, context, owner.tenant)
    special = bool(request.add_special_tokens)
    return await encoded(text, "messages", model.tokenizer, context, special=special, owner=owner)


def _pieces(token_ids: list[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]


async def detokenize(services: Services, exchange: HttpExchange) -> None:
    async with timely(services):
        with counted(exchange):
            with services.bodies.share() as share:
                request = await read_body(exchange, DetokenizeRequest, services.config, share)
                model = services.model
                model.check_name(request.model)
                ids = await prompt_ids(
                    request.tokens,
                    "tokens",
                    model.tokenizer,
                    model.max_model_len,
                    special=False,
                    owner=owner_of(exchange),
                )
                prompt = await model.tokenizer.decode_async(ids)
                del request, ids
            with services.kept.share(len(prompt) * CHARACTER_BYTES, exchange.owner):
                await send_pieces(exchange.send, json_pieces({"prompt": prompt}))


async def prompt_size(services: Services, exchange: HttpExchange, request: ChatRequest) -> int:
    """Counts the tokens of a chat's prompt."""
    model, context = services.model, services.model.max_model_len
    chat = TemplateInput.of(request, tools_to_call(request), template_variables(request))
    owner = owner_of(exchange)
    text, _ = await chat_prompt(model, chat, context, owner.tenant)
    ids = await encoded(text, "messages", model.tokenizer, context, special=False, owner=owner)
    return len(ids)
