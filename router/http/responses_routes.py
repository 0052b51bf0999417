"""POST /v1/responses, and GET, DELETE and cancel of one.

Each is written by a task of its own, which a client follows: one that was asked for in the background goes on without any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from tandem.router.dispatch import Generation
from tandem.router.http.body import read_body
from tandem.router.http.disconnect import until_disconnect
from tandem.router.http.errors import RouterDraining
from tandem.router.http.event_stream import EventStream
from tandem.router.http.gate import exchange_of
from tandem.router.http.generate_routes import asked_tokens, caller_of
from tandem.router.http.memory import answer_size, inputs_size
from tandem.router.http.respond import send_json
from tandem.router.http.services import Services
from tandem.router.keys import Reservation
from tandem.router.openai.plan import GenerationPlan, plan_chat
from tandem.router.responses.response_maker import ResponseMaker, new_id
from tandem.router.responses.response_store import StoredResponse
from tandem.router.responses.responses_request import (
    InputItem,
    ResponsesRequest,
    as_chat,
    check,
    items_of,
    shown_fields,
)
from tandem.wire.errors import Cancelled, InternalError, InvalidRequest, TandemError

logger = logging.getLogger(__name__)


class ResponsesRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, exchange = self._services, exchange_of(scope)
        arrived = time.monotonic()
        if services.draining:
            raise RouterDraining("this router is shutting down; another takes new requests")
        reservation = exchange.tenant.enter() if exchange.tenant is not None else None
        try:
            request, plan, response = await self._read(scope, receive, arrived)
            if reservation is not None:
                asked: list[int | None] = [None] if request.max_output_tokens is None else asked_tokens(plan)
                reservation.take_tokens(plan.prompt_tokens, asked)
            if request.store is not False:
                services.responses.add(response)
            response.task = asyncio.create_task(
                self._write(response, plan, reservation, arrived), name=f"response-{response.id}"
            )
        except BaseException:
            if reservation is not None:
                reservation.void()
            raise
        try:
            await self._answer(scope, send, request, response)
        except BaseException:
            if not request.background:
                response.task.cancel()
                services.responses.drop(response)
            raise

    async def _read(
        self, scope: Scope, receive: Receive, arrived: float
    ) -> tuple[ResponsesRequest, GenerationPlan, StoredResponse]:
        services, owner = self._services, _owner(scope)
        with services.bodies.share() as share:
            request = await read_body(scope, receive, ResponsesRequest, services.config, share)
            check(request)
            services.model.check_name(request.model)
            before: list[InputItem] = []
            if request.previous_response_id is not None:
                before = _conversation(services.responses.find(request.previous_response_id, owner))
            chat = as_chat(request, before)
            plan = await plan_chat(chat, services.model, caller_of(scope, services, chat, arrived))
        body: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **shown_fields(request, services.model.name_of(request.model)),
        }
        items = [*before, *items_of(request)]
        return request, plan, StoredResponse(body, owner, items, keeps_events=bool(request.background))

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

    async def _write(
        self, response: StoredResponse, plan: GenerationPlan, reservation: Reservation | None, arrived: float
    ) -> None:
        """To its end, whatever that is: nobody may be left waiting for it."""
        services = self._services
        reader = plan.reader()
        maker = ResponseMaker(response.body, reader)
        error: TandemError | None = None
        try:
            inputs = inputs_size(plan)
            with services.kept.share(inputs + answer_size(plan, streams=True)) as kept:
                generation = await services.dispatcher.generate(plan.specs, response.owner, eager=True)
                try:
                    kept.grows_with(generation, inputs)
                    await self._read_answer(response, plan, maker, generation)
                finally:
                    generation.cancel()
                    if reservation is not None:
                        reservation.settle(
                            plan.prompt_tokens, [len(life.ledger.tokens) for life in generation.lives]
                        )
                    services.metrics.e2e_latency.observe(time.monotonic() - arrived)
        except asyncio.CancelledError:
            error = Cancelled("the response was cancelled")
            response.add(maker.cancel())
        except TandemError as failure:
            error = failure
            response.add(maker.fail(failure))
        except Exception as bug:
            logger.exception("%s: writing it failed", response.id)
            error = InternalError(f"the router failed to write it: {type(bug).__name__}")
            response.add(maker.fail(error))
        finally:
            if reservation is not None:
                reservation.void()
            response.end(error)
            services.responses.settle()

    async def _read_answer(
        self, response: StoredResponse, plan: GenerationPlan, maker: ResponseMaker, generation: Generation
    ) -> None:
        (choice,) = plan.choices(generation, self._services.model.tokenizer)
        begun = response.keeps_events
        if begun:
            response.add(maker.begin())
        while choice.finish_reason is None:
            await generation.news()
            if not begun and choice.failed is None:  # until then a failure is a status code
                begun = True
                response.add(maker.begin())
            while (delta := choice.advance()) is not None:
                response.add(maker.events(delta))
                if delta.finish_reason is not None:
                    break
            if choice.failed is not None and not choice.behind:
                raise choice.failed
        response.add(maker.complete(plan, choice))


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
        await stream.write(b"", last=True)

    await until_disconnect(scope, write)


class ResponseRoute:
    """GET: as it is now, or with `stream=true` its events above `starting_after`. DELETE: forgets it."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        store = self._services.responses
        response = store.find(scope["path_params"]["response_id"], _owner(scope))
        if scope["method"] == "DELETE":
            if response.task is not None:
                response.task.cancel()
            store.drop(response)
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

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._services.responses.find(scope["path_params"]["response_id"], _owner(scope))
        if not response.body["background"]:
            raise InvalidRequest(
                "only a response that was made in the background can be cancelled", "response_id"
            )
        if response.task is not None and not response.ended:
            response.task.cancel()
            async for _ in response.follow(len(response.events) - 1):
                pass
        await send_json(send, response.body)


def _owner(scope: Scope) -> str:
    tenant = exchange_of(scope).tenant
    return tenant.name if tenant is not None else ""


def _conversation(response: StoredResponse) -> list[InputItem]:
    if not response.ended or response.error is not None:
        raise InvalidRequest(
            f"previous_response_id: {response.id} is {response.body['status']}; only a complete one can be gone on with",
            "previous_response_id",
        )
    return [*response.items, *response.output_items()]
