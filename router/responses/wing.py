"""POST /v1/responses, and GET, DELETE, cancel and input items of one response; what one's prompt would count.

A response's events are kept by number, and clients follow what is kept. So `ResponseService` writes responses,
not a handler.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import msgspec

from tandem.api.openai.generation_plan import GenerationPlan
from tandem.api.openai.plan import plan_chat
from tandem.api.responses.answer_types import InputItems, InputTokens, ResponseAnswer, ResponseDeleted
from tandem.api.responses.response_store import StoredResponse
from tandem.api.responses.responses_request import InputItem, ResponsesRequest, as_chat, check, naming_its_fields
from tandem.base.errors import InvalidRequest
from tandem.router.dispatch import LeftBehind
from tandem.router.http.body import beside, read_body
from tandem.router.http.exchange import EventStream, HttpExchange, Query, send_json
from tandem.router.http.generate_routes import asked_tokens, caller_of, enter
from tandem.router.http.operation import EVENT, ApiOperation
from tandem.router.http.services import Services
from tandem.router.http.text_routes import counted, prompt_size, timely
from tandem.router.responses.response_service import ResponseService, conversation
from tandem.router.wings import RouteRow, RouterWing

MOST_ITEMS = 100


async def create_response(service: ResponseService, services: Services, exchange: HttpExchange) -> None:
    reservation = enter(services, exchange)
    try:
        services.quoter.check(exchange)
        request, plan, before = await _read(service, services, exchange)
        asked: list[int | None] = [None] if request.max_output_tokens is None else asked_tokens(plan)
        reservation.take_tokens(plan.prompt_tokens, asked)
        response = service.begin(request, plan, before, exchange.owner, reservation, exchange.arrived)
    except BaseException:
        reservation.void()
        raise
    try:
        await _answer(exchange, request, response)
    except BaseException:
        if not request.background:
            service.forget(response)
        raise


async def _read(
    service: ResponseService, services: Services, exchange: HttpExchange
) -> tuple[ResponsesRequest, GenerationPlan, list[InputItem]]:
    with services.bodies.share() as share:
        request = await read_body(exchange, ResponsesRequest, services.config, share)
        check(request)
        services.model.check_name(request.model)
        before = await _before(service, exchange, request)
        chat = await beside(share, as_chat, request, before)
        with naming_its_fields():
            plan = await plan_chat(chat, services.model, caller_of(services, exchange, chat))
    return request, plan, before


async def _answer(exchange: HttpExchange, request: ResponsesRequest, response: StoredResponse) -> None:
    if request.background and not request.stream:
        await send_json(exchange.send, response.body)
        return
    if request.stream:
        await follow_to_end(exchange, response, after=-1)
        return

    async def wait() -> None:
        async for _ in response.follow(-1):
            pass

    await exchange.until_disconnect(wait)
    if response.error is not None:
        raise response.error
    await send_json(exchange.send, response.body)


async def follow_to_end(exchange: HttpExchange, response: StoredResponse, after: int) -> None:
    stream = EventStream(exchange)

    async def write() -> None:
        async for events in response.follow(after):
            if not stream.begun and response.ended and response.error is not None and not response.keeps_events:
                raise response.error  # before the first byte, a failure is a status code
            await stream.write(events)
        if isinstance(response.error, LeftBehind):
            raise response.error  # another router streams the rest
        await stream.write(b"", last=True)

    await exchange.until_disconnect(write)


async def one_response(service: ResponseService, services: Services, exchange: HttpExchange) -> None:
    """GET answers with the response as it is now, or, with `stream=true`, its events after `starting_after`.
    DELETE forgets it."""
    response = await _find(service, exchange)
    if exchange.scope["method"] == "DELETE":
        await service.forget_everywhere(response)
        await send_json(exchange.send, {"id": response.id, "object": "response", "deleted": True})
        return
    query = Query(exchange)
    if (query.text("stream") or "").lower() != "true":
        await send_json(exchange.send, response.body)
        return
    if not response.keeps_events:
        raise InvalidRequest("stream: only a background response can be streamed again", "stream")
    after = query.text("starting_after") or "-1"
    if re.fullmatch(r"-?[0-9]{1,11}", after) is None:
        raise InvalidRequest("starting_after: must be an event's sequence_number", "starting_after")
    await follow_to_end(exchange, response, max(-1, int(after)))


async def cancel_response(service: ResponseService, services: Services, exchange: HttpExchange) -> None:
    """Cancels a response that was asked for in the background. One that has ended stays as it is."""
    response = await _find(service, exchange)
    if not response.body["background"]:
        raise InvalidRequest("only a background response can be cancelled", "response_id")
    await service.cancel(response)
    await send_json(exchange.send, response.body)


async def input_items(service: ResponseService, services: Services, exchange: HttpExchange) -> None:
    """Lists what the response was asked with, the conversation before it included, the last item first."""
    response = await _find(service, exchange)
    items = [_shown(item, f"{response.id}_{at}") for at, item in enumerate(response.items)]
    query = Query(exchange)
    if query.text("order") != "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    if (after := query.text("after")) in ids:
        items = items[ids.index(after) + 1 :]
    shown = items[: query.number("limit", usual=20, most=MOST_ITEMS)]
    await send_json(
        exchange.send,
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(shown) < len(items),
        },
    )


def _shown(item: InputItem, item_id: str) -> dict[str, Any]:
    shown = {"id": item_id, **{name: value for name, value in msgspec.to_builtins(item).items() if value is not None}}
    if isinstance(item.content, str) and item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": item.content}]
    return shown


async def count_input(service: ResponseService, services: Services, exchange: HttpExchange) -> None:
    """Counts the tokens of the prompt that a request for a response would have."""
    async with timely(services):
        with counted(exchange):
            with services.bodies.share() as share:
                request = await read_body(exchange, ResponsesRequest, services.config, share)
                check(request)
                services.model.check_name(request.model)
                before = await _before(service, exchange, request)
                with naming_its_fields():
                    chat = await beside(share, as_chat, request, before)
                    count = await prompt_size(services, exchange, chat)
                del request, before, chat
            await send_json(exchange.send, {"object": "response.input_tokens", "input_tokens": count})


async def _before(service: ResponseService, exchange: HttpExchange, request: ResponsesRequest) -> list[InputItem]:
    """Returns the conversation that the request continues."""
    if request.previous_response_id is None:
        return []
    return conversation(await service.find(request.previous_response_id, exchange.owner))


async def _find(service: ResponseService, exchange: HttpExchange) -> StoredResponse:
    return await service.find(exchange.scope["path_params"]["response_id"], exchange.owner)


_ERRORS = ("400", "401", "404")


class Responses(RouterWing):
    # fmt: off
    operations = (
        ApiOperation(
            "post", "/v1/responses", "Answer a chat with items", ResponseAnswer, ResponsesRequest, event=EVENT,
            example={"input": "Hello!", "max_output_tokens": 60},
        ),
        ApiOperation(
            "post", "/v1/responses/input_tokens", "Count the tokens of its prompt", InputTokens, ResponsesRequest,
            example={"input": "Hello!"},
        ),
        ApiOperation("get", "/v1/responses/{response_id}/input_items", "What it was asked with", InputItems, errors=_ERRORS),
        ApiOperation("post", "/v1/responses/{response_id}/cancel", "End it", ResponseAnswer, errors=_ERRORS),
        ApiOperation("get", "/v1/responses/{response_id}", "One that is kept, as it is now", ResponseAnswer, errors=_ERRORS),
        ApiOperation("delete", "/v1/responses/{response_id}", "Forget it", ResponseDeleted, errors=_ERRORS),
    )
    # fmt: on

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.service = ResponseService(services)

    def routes(self) -> list[RouteRow]:
        service = self.service
        return [
            ("/v1/responses", partial(create_response, service), ["POST"]),
            ("/v1/responses/input_tokens", partial(count_input, service), ["POST"]),
            ("/v1/responses/{response_id}/input_items", partial(input_items, service), ["GET"]),
            ("/v1/responses/{response_id}", partial(one_response, service), ["GET", "DELETE"]),
            ("/v1/responses/{response_id}/cancel", partial(cancel_response, service), ["POST"]),
        ]


WING = Responses
