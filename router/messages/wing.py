"""POST /v1/messages and /v1/messages/count_tokens: chats in the form of Anthropic's API."""

from __future__ import annotations

from functools import partial

import msgspec

from tandem.api.anthropic.answer_types import MessageAnswer, MessagesError, TokenCount
from tandem.api.anthropic.messages_answer import MessageStream, whole_message
from tandem.api.anthropic.messages_request import CountRequest, MessagesRequest, as_chat
from tandem.api.openai.answer import json_pieces
from tandem.api.openai.plan import plan_chat
from tandem.router.http.body import beside, read_body
from tandem.router.http.exchange import HttpExchange, send_pieces
from tandem.router.http.generate_routes import GenerateEndpoint, generate
from tandem.router.http.operation import EVENT, ApiOperation
from tandem.router.http.services import Services
from tandem.router.http.text_routes import counted, prompt_size, timely
from tandem.router.wings import RouteRow, RouterWing

MESSAGES = GenerateEndpoint("msg", MessagesRequest, plan_chat, whole_message, MessageStream, as_chat)

_ERROR_TYPES = {
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "request_too_large": "request_too_large",
    "deadline_exceeded": "timeout_error",
}


def messages_error(body: bytes) -> bytes:
    """Makes the same error in the form of Anthropic's API."""
    error = msgspec.json.decode(body)["error"]
    kind = _ERROR_TYPES.get(error["code"], error["type"])
    kind = "api_error" if kind == "server_error" else kind
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error["message"]}})


async def count_tokens(services: Services, exchange: HttpExchange) -> None:
    """Counts the tokens of a chat's prompt, for Anthropic's clients."""
    async with timely(services):
        with counted(exchange):
            with services.bodies.share() as share:
                request = await read_body(exchange, CountRequest, services.config, share)
                model = services.model
                model.check_name(request.model)
                count = await prompt_size(services, exchange, await beside(share, as_chat, request))
                del request
            await send_pieces(exchange.send, json_pieces({"input_tokens": count}))


_HELLO = [{"role": "user", "content": "Hello!"}]


class Messages(RouterWing):
    # fmt: off
    operations = (
        ApiOperation(
            "post", "/v1/messages", "Answer a chat, as Anthropic's API does", MessageAnswer, MessagesRequest,
            error=MessagesError, event=EVENT, example={"messages": _HELLO, "max_tokens": 60},
        ),
        ApiOperation(
            "post", "/v1/messages/count_tokens", "Count the tokens of a chat's prompt", TokenCount, CountRequest,
            error=MessagesError, example={"messages": _HELLO},
        ),
    )
    # fmt: on
    error_form = ("/v1/messages", messages_error)

    def routes(self) -> list[RouteRow]:
        return [
            ("/v1/messages", partial(generate, MESSAGES), ["POST"]),
            ("/v1/messages/count_tokens", count_tokens, ["POST"]),
        ]


WING = Messages
