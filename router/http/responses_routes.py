"""POST /v1/responses, and GET, DELETE and cancel of one. What is done with them is the desk's."""

from __future__ import annotations

import time
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from tandem.router.dispatch import LeftBehind
from tandem.router.http.body import read_body
from tandem.router.http.disconnect import until_disconnect
from tandem.router.http.errors import RouterDraining
from tandem.router.http.event_stream import EventStream
from tandem.router.http.gate import exchange_of
from tandem.router.http.generate_routes import asked_tokens, caller_of
from tandem.router.http.respond import send_json
from tandem.router.http.response_desk import ResponseDesk, conversation
from tandem.router.http.services import Services
from tandem.router.openai.plan import GenerationPlan, plan_chat
from tandem.router.responses.response_store import StoredResponse
from tandem.router.responses.responses_request import InputItem, ResponsesRequest, as_chat, check
from tandem.wire.errors import InvalidRequest


class ResponsesRoute:
    def __init__(self, services: Services, desk: ResponseDesk) -> None:
        self._services = services
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, exchange = self._services, exchange_of(scope)
        arrived = time.monotonic()
        if services.draining:
            raise RouterDraining("this router is shutting down; another takes new requests")
        reservation = exchange.tenant.enter() if exchange.tenant is not None else None
        try:
            request, plan, before = await self._read(scope, receive, arrived)
            if reservation is not None:
                asked: list[int | None] = [None] if request.max_output_tokens is None else asked_tokens(plan)
                reservation.take_tokens(plan.prompt_tokens, asked)
            response = self._desk.begin(request, plan, before, _owner(scope), reservation, arrived)
        except BaseException:
            if reservation is not None:
                reservation.void()
            raise
        try:
            await self._answer(scope, send, request, response)
        except BaseException:
            if not request.background:
                self._desk.forget(response)
            raise

    async def _read(
        self, scope: Scope, receive: Receive, arrived: float
    ) -> tuple[ResponsesRequest, GenerationPlan, list[InputItem]]:
        services = self._services
        with services.bodies.share() as share:
            request = await read_body(scope, receive, ResponsesRequest, services.config, share)
            check(request)
            services.model.check_name(request.model)
            before: list[InputItem] = []
            if request.previous_response_id is not None:
                before = conversation(await self._desk.find(request.previous_response_id, _owner(scope)))
            chat = as_chat(request, before)
            plan = await plan_chat(chat, services.model, caller_of(scope, services, chat, arrived))
        return request, plan, before

    async def _answer(
        self, scope: Scope, send: Send, request: ResponsesRequest, response: StoredResponse
    ) -> None:
        if request.background and not request.stream:
            await send_json(send, response.body)
            return
        if request.stream:
            await follow_to_end(scope, send, response, after=-1)
            return

        async def wait() -> None:
            async for _ in response.follow(-1):
                pass

        await until_disconnect(scope, wait)
        if response.error is not None:
            raise response.error
        await send_json(send, response.body)


async def follow_to_end(scope: Scope, send: Send, response: StoredResponse, after: int) -> None:
    stream = EventStream(scope, send, [])

    async def write() -> None:
        async for events in response.follow(after):
            if (
                not stream.begun
                and response.ended
                and response.error is not None
                and not response.keeps_events
            ):
                raise response.error  # before the first byte a failure is a status code
            await stream.write(events)
        if isinstance(response.error, LeftBehind):
            raise response.error  # another router streams the rest
        await stream.write(b"", last=True)

    await until_disconnect(scope, write)


class ResponseRoute:
    """GET: as it is now, or with `stream=true` its events above `starting_after`. DELETE: forgets it."""

    def __init__(self, desk: ResponseDesk) -> None:
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._desk.find(scope["path_params"]["response_id"], _owner(scope))
        if scope["method"] == "DELETE":
            self._desk.forget(response)
            await send_json(send, {"id": response.id, "object": "response", "deleted": True})
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if query.get("stream", ["false"])[0].lower() != "true":
            await send_json(send, response.body)
            return
        if not response.keeps_events:
            raise InvalidRequest(
                "stream: only a response that was made in the background is streamed again", "stream"
            )
        after = query.get("starting_after", ["-1"])[0]
        if not after.lstrip("-").isdigit() or len(after) > 12:
            raise InvalidRequest("starting_after: must be an event's sequence_number", "starting_after")
        await follow_to_end(scope, send, response, max(-1, int(after)))


class CancelResponseRoute:
    """Of one that was asked for in the background. One that has ended stays as it is."""

    def __init__(self, desk: ResponseDesk) -> None:
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._desk.find(scope["path_params"]["response_id"], _owner(scope))
        if not response.body["background"]:
            raise InvalidRequest(
                "only a response that was made in the background can be cancelled", "response_id"
            )
        await self._desk.cancel(response)
        await send_json(send, response.body)


def _owner(scope: Scope) -> str:
    tenant = exchange_of(scope).tenant
    return tenant.name if tenant is not None else ""
