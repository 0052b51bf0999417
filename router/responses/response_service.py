"""Begins, writes, finds, cancels and forgets responses.

A task of its own writes each response, and clients follow it. A background response goes on without any
client, and even without this router: the node that decodes it keeps its tokens, and any router makes the same
events of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tandem.api.lives import ReadableLives
from tandem.api.openai.answer import PIECE_TOKENS
from tandem.api.openai.caller import Caller
from tandem.api.openai.generation_plan import GenerationPlan
from tandem.api.openai.plan import plan_chat
from tandem.api.responses.response_maker import ResponseMaker, new_response_id
from tandem.api.responses.response_store import ResponseNotFound, ResponseStore, StoredResponse
from tandem.api.responses.responses_request import InputItem, ResponsesRequest, as_chat, items_of, shown_fields
from tandem.api.sequence import KeptAnswer
from tandem.base.errors import Cancelled, InternalError, InvalidRequest, TandemError
from tandem.router.dispatch import Generation, LeftBehind
from tandem.router.http.body import answer_size, inputs_size
from tandem.router.http.services import Services
from tandem.router.keys import Reservation
from tandem.router.responses.recall import FoundAnswer, Recalls
from tandem.router.siblings import Siblings


class ResponseQuestion(msgspec.Struct, frozen=True):
    response_id: str
    owner: str


class FoundResponse(msgspec.Struct, frozen=True):
    body: dict[str, Any] | None = None  # None: not found
    items: list[InputItem] = []
    events: list[bytes] = []
    keeps_events: bool = False
    ended: bool = False


class SharedResponses:
    """Asks the siblings for responses, and answers them from this process's store."""

    def __init__(self, siblings: Siblings, store: ResponseStore) -> None:
        self._siblings = siblings
        self._store = store
        siblings.answers.update(response=self._find, forget=self._forget)

    async def _find(self, body: bytes) -> FoundResponse:
        asked = msgspec.msgpack.decode(body, type=ResponseQuestion)
        found = self._store.find(asked.response_id, asked.owner)
        if found is None or (found.error is not None and found.body["status"] in ("queued", "in_progress")):
            return FoundResponse()
        return FoundResponse(found.body, found.items, found.events, found.keeps_events, found.ended)

    async def _forget(self, body: bytes) -> bool:
        asked = msgspec.msgpack.decode(body, type=ResponseQuestion)
        found = self._store.find(asked.response_id, asked.owner)
        if found is not None:
            if found.task is not None:
                found.task.cancel()
            self._store.drop(found)
        return found is not None

    async def copy_of(self, response_id: str, owner: str) -> StoredResponse | None:
        """Returns a copy of a response that a sibling has, or None. A background response that is still being
        written is not copied: it is found on its node."""
        told, _ = await self._siblings.ask("response", FoundResponse, ResponseQuestion(response_id, owner))
        for found in told.values():
            if found.body is not None and (found.ended or not found.keeps_events):
                copy = StoredResponse(found.body, owner, found.items, keeps_events=found.keeps_events)
                copy.events, copy.ended = found.events, found.ended
                return copy
        return None

    async def forget(self, response_id: str, owner: str) -> None:
        await self._siblings.ask("forget", bool, ResponseQuestion(response_id, owner))


logger = logging.getLogger(__name__)

_ID = re.compile(r"resp_[0-9a-f]{48}")
CANCELLED = "the response was cancelled"
# How many events are made at once from kept tokens before the event loop goes on.
TURN_EVENTS = 64


class AnswerNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node keeps besides a background answer's tokens: all that another router needs to make the
    response."""

    owner: str
    created_at: int
    request: ResponsesRequest
    before: list[InputItem]


class ResponseService:
    """This router's responses, and the tasks that write them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.store = ResponseStore(services.config.limits.responses_bytes)
        self._shared = SharedResponses(services.siblings, self.store)
        self.recalls = Recalls(services.config, services.links, services.pool)
        services.dispatcher.followed = self.recalls
        self._adopting: dict[tuple[str, str], asyncio.Task[StoredResponse]] = {}

    def begin(
        self,
        request: ResponsesRequest,
        plan: GenerationPlan,
        before: list[InputItem],
        owner: str,
        reservation: Reservation,
        arrived: float,
    ) -> StoredResponse:
        """Starts the task that writes the response, and stores the response unless `store` is false. Raises
        StoreFull. The task settles `reservation`."""
        note = AnswerNote(owner, int(time.time()), request, before)
        response = self._response(new_response_id(), note)
        if request.store is not False:
            self.store.add(response)
        if request.background:
            plan = _kept(plan, response.id, note)

        async def make() -> ReadableLives:
            return await self._services.dispatcher.generate(plan.specs, owner, eager=True)

        self._write(response, plan, make, reservation, arrived)
        return response

    async def find(self, response_id: str, owner: str) -> StoredResponse:
        """Finds a response here, in a sibling process, or on the nodes. Raises ResponseNotFound."""
        found = self.store.find(response_id, owner)
        if found is not None:
            return found
        if _ID.fullmatch(response_id) is None:
            raise ResponseNotFound(response_id)
        if (copy := await self._shared.copy_of(response_id, owner)) is not None:
            return copy
        key = (response_id, owner)
        task = self._adopting.get(key)
        if task is None:
            task = self._adopting[key] = asyncio.create_task(
                self._adopt(response_id, owner), name=f"adopt-{response_id}"
            )
            task.add_done_callback(lambda _: self._adopting.pop(key, None))
        return await asyncio.shield(task)

    async def cancel(self, response: StoredResponse) -> None:
        """Cancels a response and waits for its end. A response that has ended stays as it is."""
        if response.ended:
            return
        self.recalls.end(response.id, Cancelled(CANCELLED))
        if response.task is not None:
            response.task.cancel()
        async for _ in response.follow(len(response.events) - 1):
            pass

    async def forget_everywhere(self, response: StoredResponse) -> None:
        self.forget(response)
        await self._shared.forget(response.id, response.owner)

    def forget(self, response: StoredResponse) -> None:
        if response.body["background"]:
            self.recalls.end(response.id, Cancelled(CANCELLED), forget=True)
        if response.task is not None:
            response.task.cancel()
        self.store.drop(response)

    # --- one that another router began ------------------------------------------------------------------------

    async def _adopt(self, response_id: str, owner: str) -> StoredResponse:
        services = self._services
        found = await self.recalls.find(response_id, owner)
        if found is None:
            raise ResponseNotFound(response_id)
        try:
            note = msgspec.json.decode(found.keep.note, type=AnswerNote)
        except msgspec.DecodeError as error:
            logger.warning("%s: another release of the router began it: %s", response_id, error)
            raise ResponseNotFound(response_id) from error
        if note.owner != owner:
            raise ResponseNotFound(response_id)
        arrived = time.monotonic()
        caller = Caller(response_id, arrived + services.config.timeouts.total, lambda salt: salt, None)
        plan = _kept(await plan_chat(as_chat(note.request, note.before), services.model, caller), response_id, note)
        response = self._response(response_id, note)
        self.store.add(response)
        logger.info("%s: found on %s", response_id, found.node.node_id)
        self._write(response, plan, self._following(found, plan, owner), Reservation(None), arrived)
        await response.caught_up.wait()
        return response

    def _following(
        self, found: FoundAnswer, plan: GenerationPlan, owner: str
    ) -> Callable[[], Awaitable[ReadableLives]]:
        async def follow() -> ReadableLives:
            return self.recalls.begin(found, plan.specs[0], owner)

        return follow

    def _response(self, response_id: str, note: AnswerNote) -> StoredResponse:
        request = note.request
        body: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": note.created_at,
            "status": "queued",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **shown_fields(request, self._services.model.name_of(request.model)),
        }
        items = [*note.before, *items_of(request)]
        return StoredResponse(body, note.owner, items, keeps_events=bool(request.background))

    # --- writing ----------------------------------------------------------------------------------------------

    def _write(
        self,
        response: StoredResponse,
        plan: GenerationPlan,
        make: Callable[[], Awaitable[ReadableLives]],
        reservation: Reservation,
        arrived: float,
    ) -> None:
        response.task = asyncio.create_task(
            self._write_to_end(response, plan, make, reservation, arrived), name=f"response-{response.id}"
        )

    async def _write_to_end(
        self,
        response: StoredResponse,
        plan: GenerationPlan,
        make: Callable[[], Awaitable[ReadableLives]],
        reservation: Reservation,
        arrived: float,
    ) -> None:
        """Writes the response to its end. However it ends, every reader is told."""
        services = self._services
        maker = ResponseMaker(response.body, plan.reader())
        error: TandemError | None = None
        lives: ReadableLives | None = None
        try:
            inputs = inputs_size(plan)
            with services.kept.share(inputs + answer_size(plan, streams=True), response.owner) as kept:
                lives = await make()
                try:
                    kept.grows_with(lives, inputs)
                    await self._read(response, plan, maker, lives)
                finally:
                    lives.cancel()
                    if isinstance(lives, Generation):
                        lives.turn_ended(plan.called)
                    reservation.settle(plan.prompt_tokens, [len(life.ledger.tokens) for life in lives.lives])
                    services.metrics.e2e_latency.observe(time.monotonic() - arrived)
        except (asyncio.CancelledError, Cancelled):
            error = Cancelled(CANCELLED)
            response.add(maker.cancel())
        except LeftBehind as left:
            error = left  # it does not end here: another router goes on with it
        except TandemError as failure:
            error = failure
            response.add(maker.fail(failure))
            if isinstance(lives, Generation) and response.keeps_events:
                # Other routers hear it from the nodes.
                self.recalls.end(response.id, failure)
        except Exception as bug:
            logger.exception("%s: writing it failed", response.id)
            error = InternalError(f"the router failed to write it: {type(bug).__name__}")
            response.add(maker.fail(error))
        finally:
            reservation.void()
            response.end(error)
            self.store.settle()

    async def _read(
        self, response: StoredResponse, plan: GenerationPlan, maker: ResponseMaker, lives: ReadableLives
    ) -> None:
        (choice,) = plan.choices(lives, self._services.model.tokenizer)
        begun = response.keeps_events
        # One token per step, so that every router makes the same events.
        most = 1 if response.keeps_events else PIECE_TOKENS
        if begun:
            response.add(maker.begin())
        while choice.finish_reason is None:
            await lives.news()
            if not begun and choice.failed is None:  # before the first event, a failure is a status code
                begun = True
                response.add(maker.begin())
            turn = 0
            while (delta := choice.advance(most)) is not None or choice.behind:
                if delta is not None:
                    response.add(maker.events(delta))
                turn += 1
                if turn % TURN_EVENTS == 0:
                    await asyncio.sleep(0)
            if choice.failed is not None and not choice.behind:
                raise choice.failed
            if choice.finish_reason is None:
                response.caught_up.set()
        response.add(maker.complete(plan, choice))


def _kept(plan: GenerationPlan, response_id: str, note: AnswerNote) -> GenerationPlan:
    (spec,) = plan.specs
    keep = KeptAnswer(response_id, msgspec.json.encode(note))
    return msgspec.structs.replace(plan, specs=[msgspec.structs.replace(spec, keep=keep)])


def conversation(response: StoredResponse) -> list[InputItem]:
    """Returns the items that a following request continues. Raises InvalidRequest unless the response is
    complete."""
    if response.body["status"] not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"previous_response_id: {response.id} is {response.body['status']}; only a completed response can be continued",
            "previous_response_id",
        )
    return [*response.items, *response.output_items()]
