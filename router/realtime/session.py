"""One session of /v1/realtime: a conversation over a WebSocket, whose prompt may arrive in parts and is read ahead meanwhile.

Reading ahead is a request for one token of the text so far, which a prefill node serves alone. Its blocks
stay in that node's prefix cache and may be evicted like any others. So a client that thinks holds nothing on
a node, and the answer comes from an ordinary request for the whole prompt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import msgspec

from tandem.api.json_body import parse_object
from tandem.api.openai.answer import Choice, json_pieces
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.generation_plan import GenerationPlan
from tandem.api.openai.plan import plan_chat
from tandem.api.openai.served_model import ModelElsewhere
from tandem.api.pieces import Text
from tandem.api.realtime.events import (
    Conversation,
    ItemCreate,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionUpdate,
    TextAppend,
    TextClear,
    TextCommit,
    read_event,
    settled_tokens,
)
from tandem.api.sequence import SequenceSpec
from tandem.base.errors import InvalidRequest, TandemError
from tandem.http_server.websocket import GOING_AWAY, WebSocket
from tandem.router.dispatch import Generation
from tandem.router.http.body import INLINE_BYTES, KeptShare, answer_size, inputs_size
from tandem.router.http.errors import BodyTooLarge, body_of
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.generate_routes import KeptSize, asked_tokens, caller_of, enter, planned, running
from tandem.router.http.services import Services
from tandem.router.keys import QuotaExceeded, Reservation
from tandem.wire.sampling import SamplingParams

logger = logging.getLogger(__name__)

# How much new text there must be before the prompt is tokenized again: at least this many characters, and one
# part in AHEAD_SHARE of what there was. So the total work stays linear.
AHEAD_CHARACTERS = 256
AHEAD_SHARE = 4
# Appended as a possible continuation. Tokens that it changes are not settled yet.
_MORE = " and so on"

_Made = tuple[str, str, dict[str, Any]]  # an answer's text, its status and its usage


class RealtimeSession:
    """One connection. The handler's task reads events. One task generates the answer, and is all that a client cancels; one tells
    of it to its end; and one reads ahead. All three end with the session."""

    def __init__(
        self, services: Services, exchange: HttpExchange, socket: WebSocket, share: KeptShare, model: str | None
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._socket = socket
        self._share = share
        self._id = f"sess_{secrets.token_hex(12)}"
        self._conversation = Conversation()
        self._model = model
        self._instructions: str | None = None
        self._most_tokens: int | None = None
        self._making: asyncio.Task[_Made] | None = None
        self._answer: asyncio.Task[None] | None = None
        self._answer_id = ""
        self._ahead: asyncio.Task[None] | None = None
        self._came = 0  # characters of the whole conversation
        self._read_at = 0  # the value of `_came` when the prompt was last tokenized
        self._known = 0  # prompt tokens that were read ahead
        socket.is_busy = lambda: self._answer is not None and not self._answer.done()

    def event(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Makes an event's JSON, a large one in pieces."""
        return json_pieces({"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **fields})

    def shown(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "realtime.session",
            "type": "realtime",
            "model": self._services.model.name_of(self._model),
            "instructions": self._instructions or "",
            "output_modalities": ["text"],
            "max_output_tokens": "inf" if self._most_tokens is None else self._most_tokens,
        }

    async def run(self) -> None:
        try:
            while (text := await self._socket.receive()) is not None:
                await self._take(text)
            if self._socket.stopped and self._answer is not None:
                await self._answer
        finally:
            for task in (self._making, self._answer, self._ahead):
                await _ended(task)
            await self._socket.goodbye(GOING_AWAY, "the router stops or the client is gone")

    async def _take(self, text: str) -> None:
        event_id: str | None = None
        try:
            value = await self._parsed(text)
            given = value.get("event_id")
            event_id = given if isinstance(given, str) else None
            await self._act(value)
        except TandemError as error:
            await self._tell_error(error, event_id)

    async def _parsed(self, text: str) -> dict[str, Any]:
        """Like a body's: a large event is parsed in a thread, one at a time."""
        limits = self._services.config.limits
        if len(text) <= INLINE_BYTES:
            return parse_object(text.encode(), limits)
        async with self._services.bodies.parsing(self._exchange.owner):
            return await asyncio.to_thread(lambda: parse_object(text.encode(), limits))

    async def _tell_error(self, error: TandemError, event_id: str | None) -> None:
        body = msgspec.json.decode(body_of(error))["error"]
        await self._socket.send(self.event("error", error={**body, "event_id": event_id}))

    async def _act(self, value: dict[str, Any]) -> None:
        event = read_event(value)
        conversation = self._conversation
        if isinstance(event, TextAppend):
            self._grow(event.text)
            conversation.buffer.append(event.text)
            self._look_ahead()
        elif isinstance(event, TextCommit):
            await self._add(_new_id("item"), "user", conversation.take_buffer())
        elif isinstance(event, TextClear):
            self._forget(*conversation.buffer)
            conversation.buffer.clear()
            await self._socket.send(self.event("input_text_buffer.cleared"))
        elif isinstance(event, ItemCreate):
            text = "".join(part.text for part in event.item.content)
            self._grow(text)
            try:
                await self._add(event.item.id or _new_id("item"), event.item.role, text)
            except InvalidRequest:
                self._forget(text)
                raise
            self._look_ahead()
        elif isinstance(event, SessionUpdate):
            await self._update(event)
        elif isinstance(event, ResponseCreate):
            await self._begin(event.response)
        elif isinstance(event, ResponseCancel):
            self._cancel(event.response_id)

    def _grow(self, text: str) -> None:
        if self._came + len(text) > self._services.config.limits.body_bytes:
            most = self._services.config.limits.body_bytes
            raise BodyTooLarge(f"a conversation has at most {most} characters; begin another")
        self._share.grow(sys.getsizeof(text))
        self._came += len(text)

    def _forget(self, *texts: str) -> None:
        for text in texts:
            self._share.shrink(sys.getsizeof(text))
            self._came -= len(text)
        self._read_at = min(self._read_at, self._came)

    async def _update(self, event: SessionUpdate) -> None:
        session = event.session
        try:
            self._services.model.check_name(session.model)
        except ModelElsewhere as there:
            raise InvalidRequest(
                f"session.model: {there.model!r} is another deployment's: connect with /v1/realtime?model={quote(there.model)}",
                "session.model",
            ) from None
        self._model = session.model or self._model
        if session.instructions is not None:
            self._grow(session.instructions)
            if self._instructions is not None:
                self._forget(self._instructions)
            self._instructions = session.instructions
        if session.max_output_tokens is not None:
            self._most_tokens = None if session.max_output_tokens == "inf" else session.max_output_tokens
        await self._socket.send(self.event("session.updated", session=self.shown()))

    async def _add(self, item_id: str, role: str, text: str) -> None:
        self._conversation.add(item_id, role, text)
        kind = "output_text" if role == "assistant" else "input_text"
        item = _item(item_id, role, [{"type": kind, "text": text}], "completed")
        await self._socket.send(self.event("conversation.item.added", item=item))
        await self._socket.send(self.event("conversation.item.done", item=item))

    # --- reading ahead

    def _look_ahead(self) -> None:
        if self._socket.is_busy() or (self._ahead is not None and not self._ahead.done()):
            return
        if self._came - self._read_at >= max(AHEAD_CHARACTERS, self._read_at // AHEAD_SHARE):
            self._read_at = self._came
            self._ahead = asyncio.create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        """Reads ahead if possible. On failure, the answer's own request computes the prompt."""
        try:
            await self._read_some()
        except TandemError as error:
            logger.debug("%s: not read ahead: %s", self._exchange.request_id, error)
        except Exception:
            logger.exception("%s: reading ahead failed", self._exchange.request_id)

    async def _read_some(self) -> None:
        services, tenant = self._services, self._exchange.tenant
        one = ResponseFields(max_output_tokens=1)
        request = self._request(one, with_buffer=True)
        continued = self._request(one, with_buffer=True, more=_MORE)
        self._exchange.arrived = time.monotonic()
        plan, longer = [
            await plan_chat(each, services.model, caller_of(services, self._exchange, each))
            for each in (request, continued)
        ]
        token_ids = settled_tokens(plan.prompts[0], longer.prompts[0])
        if len(token_ids) <= self._known:
            return
        spent = 0
        with self._in_its_place() as reservation:
            reservation.take_tokens(len(token_ids) - self._known, [])
            ahead = SamplingParams(max_tokens=1, temperature=0.0)
            whole = plan.specs[0]
            facts = msgspec.structs.replace(whole.facts, prompt_token_ids=token_ids, sampling=ahead, job_id=None)
            spec: SequenceSpec = msgspec.structs.replace(whole, facts=facts, reads_ahead=True)
            generation = await services.dispatcher.generate([spec], self._exchange.owner, eager=False)
            try:
                spent = len(token_ids) - self._known
                await generation.news()
                self._known = len(token_ids)
            finally:
                generation.cancel()
                reservation.settle(spent, [])
                if tenant is not None:
                    tenant.give_back_request()

    @contextmanager
    def _in_its_place(self) -> Iterator[Reservation]:
        """Counts an answer, or a prompt that is read ahead, in the session's own place among its key's
        requests. A session makes one of them at a time."""
        tenant = self._exchange.tenant
        if tenant is not None:
            tenant.running -= 1
        try:
            with enter(self._services, self._exchange) as reservation:
                yield reservation
        finally:
            if tenant is not None:
                tenant.running += 1
                tenant.tell()

    def _request(self, asked: ResponseFields, *, with_buffer: bool, more: str = "") -> ChatRequest:
        most = asked.max_output_tokens if asked.max_output_tokens is not None else self._most_tokens
        instructions = self._instructions if asked.instructions is None else asked.instructions
        messages = self._conversation.messages(instructions, with_buffer=with_buffer)
        if not messages:
            raise InvalidRequest("response.create: the conversation is empty; create an item first")
        if more:
            messages[-1]["content"] += more
        fields = {
            "model": self._model,
            "messages": messages,
            "max_completion_tokens": None if most == "inf" else most,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "seed": asked.seed,
            "stop": asked.stop,
            "stream": True,
        }
        try:
            return msgspec.convert({k: v for k, v in fields.items() if v is not None}, ChatRequest)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"response: {error}") from None

    # --- the answer

    async def _begin(self, asked: ResponseFields) -> None:
        if self._answer is not None and not self._answer.done():
            raise InvalidRequest("response.create: another response is being made; wait for it or cancel it")
        if self._conversation.buffer:
            raise InvalidRequest("response.create: input_text_buffer holds text; commit or clear it first")
        self._conversation.check_room()  # for the answer
        request = self._request(asked, with_buffer=False)
        await _ended(self._ahead)
        self._answer_id, item_id = _new_id("resp"), _new_id("item")
        await self._say_response("response.created", "in_progress", [])
        self._making = asyncio.create_task(self._generate(request, item_id))
        self._answer = asyncio.create_task(self._respond(self._making, item_id))

    def _cancel(self, response_id: str | None) -> None:
        if self._making is None or self._answer is None or self._answer.done():
            raise InvalidRequest("response.cancel: no response is being made")
        if response_id not in (None, self._answer_id):
            raise InvalidRequest(
                f"response_id: {response_id!r} is not being made; {self._answer_id!r} is", "response_id"
            )
        self._making.cancel()

    async def _respond(self, making: asyncio.Task[_Made], item_id: str) -> None:
        status, error, text = "completed", None, ""
        usage: dict[str, Any] | None = None
        try:
            text, status, usage = await making
        except asyncio.CancelledError:
            status = "cancelled"
        except TandemError as failure:
            status, error = "failed", failure
            if isinstance(failure, QuotaExceeded):
                self._services.metrics.refusals.inc("quota")
        except Exception:
            logger.exception("%s: a response failed", self._exchange.request_id)
            status = "failed"
        output: list[dict[str, Any]] = []
        if status in ("completed", "incomplete"):
            item = _item(item_id, "assistant", [{"type": "output_text", "text": text}], status)
            output = [item]
            self._conversation.add(item_id, "assistant", text)
            await self._socket.send(self.event("response.output_text.done", text=text, **self._where(item_id)))
            await self._socket.send(
                self.event("response.output_item.done", response_id=self._answer_id, output_index=0, item=item)
            )
        details = None
        if error is not None:
            details = {"type": status, "error": msgspec.json.decode(body_of(error))["error"]}
        await self._say_response("response.done", status, output, usage=usage, status_details=details)

    async def _say_response(self, kind: str, status: str, output: list[dict[str, Any]], **more: Any) -> None:
        response = {"id": self._answer_id, "object": "realtime.response", "status": status, "output": output}
        await self._socket.send(self.event(kind, response={**response, **more}))

    async def _generate(self, request: ChatRequest, item_id: str) -> _Made:
        """Each answer has its own trace, under the id that its client knows."""
        exchange, status = self._exchange, None
        exchange.arrived = time.monotonic()
        try:
            with self._in_its_place() as reservation:
                made = await self._generate_counted(request, item_id, reservation)
            status = 200
            return made
        except TandemError as error:
            status = error.http_status
            raise
        finally:
            if exchange.trace is not None:
                trace, exchange.trace = exchange.trace, None
                trace.end(time.monotonic(), exchange.route, status)

    async def _generate_counted(self, request: ChatRequest, item_id: str, reservation: Reservation) -> _Made:
        services, exchange = self._services, self._exchange
        plan = await planned(plan_chat, services, exchange, request, self._answer_id)
        if exchange.trace is not None:
            exchange.trace.answer_id = self._answer_id
        reservation.take_tokens(plan.prompt_tokens, asked_tokens(plan))
        size = KeptSize(inputs_size(plan), answer_size(plan, streams=True))
        async with running(services, exchange, plan, reservation, size, eager=True) as generation:
            text, choice = await self._stream(plan, generation, item_id)
            self._grow(text)
            cached = generation.lives[0].cached_tokens or 0
            usage = {
                "input_tokens": plan.prompt_tokens,
                "output_tokens": choice.completion_tokens,
                "total_tokens": plan.prompt_tokens + choice.completion_tokens,
                "input_token_details": {"cached_tokens": cached, "text_tokens": plan.prompt_tokens},
            }
            return text, "incomplete" if choice.finish_reason == "length" else "completed", usage

    async def _stream(self, plan: GenerationPlan, generation: Generation, item_id: str) -> tuple[str, Choice]:
        """Sends the text as it comes. Returns all of it."""
        (choice,) = plan.choices(generation, self._services.model.tokenizer)
        reader = plan.reader()
        written: list[str] = []
        item = _item(item_id, "assistant", [], "in_progress")
        await self._socket.send(
            self.event("response.output_item.added", response_id=self._answer_id, output_index=0, item=item)
        )
        while choice.finish_reason is None:
            await generation.news()
            while (delta := choice.advance()) is not None or choice.behind:
                if delta is None:  # tokens without text, such as special ones, and more behind them
                    continue
                text = delta.text
                if reader is not None:
                    pieces = reader.push(text)
                    if delta.finish_reason is not None:
                        pieces += reader.finish(cut=delta.cut)
                    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
                if text:
                    written.append(text)
                    where = self._where(item_id)
                    await self._socket.send(self.event("response.output_text.delta", delta=text, **where))
            if self._exchange.trace is not None:
                self._exchange.trace.flushed(time.monotonic())
            if choice.failed is not None:
                raise choice.failed
        return "".join(written), choice

    def _where(self, item_id: str) -> dict[str, Any]:
        return {"response_id": self._answer_id, "item_id": item_id, "output_index": 0, "content_index": 0}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _item(item_id: str, role: str, content: list[dict[str, str]], status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "status": status,
        "role": role,
        "content": content,
    }


async def _ended(task: asyncio.Task[Any] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task])
