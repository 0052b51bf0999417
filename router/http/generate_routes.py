"""POST /v1/completions, /v1/chat/completions and /v1/messages."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from tandem.router.anthropic.messages_answer import MessageStream, whole_message
from tandem.router.anthropic.messages_request import MessagesRequest, as_chat
from tandem.router.dispatch import Generation, RequestLife
from tandem.router.http.body import read_body
from tandem.router.http.disconnect import until_disconnect
from tandem.router.http.errors import RouterDraining
from tandem.router.http.event_stream import EventStream
from tandem.router.http.gate import HttpExchange, exchange_of
from tandem.router.http.memory import (
    PARSED_TIMES,
    SMALL_BODY,
    BodyShare,
    KeptShare,
    answer_size,
    inputs_size,
    without_payload,
)
from tandem.router.http.respond import send_pieces
from tandem.router.http.services import Services
from tandem.router.keys import Reservation
from tandem.router.openai.answer import AnswerHead
from tandem.router.openai.chat_answer import ChatStream, whole_chat
from tandem.router.openai.chat_request import ChatRequest
from tandem.router.openai.choice import Choice, Delta
from tandem.router.openai.completion_answer import CompletionStream, whole_completion
from tandem.router.openai.completion_request import CompletionRequest
from tandem.router.openai.fields import SamplingFields
from tandem.router.openai.pieces import LoopTurn
from tandem.router.openai.plan import Caller, GenerationPlan, ServedModel, plan_chat, plan_completion
from tandem.router.openai.reading import ReadChoice, read_all
from tandem.router.text.tokenizer import Tokenizer
from tandem.router.tracing.trace import RequestTrace
from tandem.wire.tracing import TracePhase

# What an answer that has fallen behind its client writes at once.
WRITE_BYTES = 64 << 10
LOGGED_IDS = 8

R = TypeVar("R", CompletionRequest, ChatRequest)


class AnswerStream(Protocol):
    def events(self, choice: Choice, delta: Delta) -> bytes: ...

    def closing(self) -> bytes: ...


class GenerateEndpoint(msgspec.Struct, frozen=True):
    """How one of the two differs from the other."""

    id_prefix: str
    request_type: Any
    plan: Callable[[Any, ServedModel, Caller], Awaitable[GenerationPlan]]
    whole: Callable[[AnswerHead, GenerationPlan, Any, Sequence[ReadChoice], Tokenizer], Iterator[bytes]]
    stream: Callable[[AnswerHead, GenerationPlan, Any, Sequence[Choice], Tokenizer], AnswerStream]
    translate: Callable[[Any], Any] | None = None  # from another API's request to ours


COMPLETIONS = GenerateEndpoint("cmpl", CompletionRequest, plan_completion, whole_completion, CompletionStream)
CHAT = GenerateEndpoint("chatcmpl", ChatRequest, plan_chat, whole_chat, ChatStream)
MESSAGES = GenerateEndpoint("msg", MessagesRequest, plan_chat, whole_message, MessageStream, as_chat)


class GenerateRoute:
    """An ASGI application: the answer is written straight to the connection, without a layer in between."""

    def __init__(self, endpoint: GenerateEndpoint, services: Services) -> None:
        self._endpoint = endpoint
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, exchange = self._services, exchange_of(scope)
        arrived = time.monotonic()
        if services.draining:
            raise RouterDraining("this router is shutting down; another takes new requests")
        tenant = exchange.tenant
        reservation = tenant.enter() if tenant is not None else None
        try:
            with services.bodies.share() as share:
                request, plan = await self._read(scope, receive, exchange, share, arrived)
                kept_of_body = share.size
                if kept_of_body > SMALL_BODY:
                    request, kept_of_body = without_payload(request), 0
            if reservation is not None:
                reservation.take_tokens(plan.prompt_tokens, _asked(request, plan))
            inputs = inputs_size(plan) + kept_of_body * PARSED_TIMES
            with services.kept.share(inputs + answer_size(plan, streams=bool(request.stream))) as kept:
                await self._run(scope, send, exchange, request, plan, reservation, kept, inputs, arrived)
        finally:
            if reservation is not None:
                reservation.void()

    async def _run(
        self,
        scope: Scope,
        send: Send,
        exchange: HttpExchange,
        request: Any,
        plan: GenerationPlan,
        reservation: Reservation | None,
        kept: KeptShare,
        inputs: int,
        arrived: float,
    ) -> None:
        services, tenant = self._services, exchange.tenant
        generation: Generation | None = None

        async def work() -> None:
            nonlocal generation
            generation = await services.dispatcher.generate(
                plan.specs, tenant.name if tenant else "", eager=bool(request.stream or plan.stops)
            )
            kept.grows_with(generation, inputs)
            await self._answer(scope, send, exchange, request, plan, generation)

        try:
            await until_disconnect(scope, work)
        finally:
            answers: list[int] = []
            if generation is not None:
                generation.cancel()
                answers = [len(life.ledger.tokens) for life in generation.lives]
                used = plan.prompt_tokens + sum(answers)
                failovers = sum(life.failovers for life in generation.lives)
                exchange.notes += (
                    f" nodes={_nodes(generation)} tokens={used} failovers={failovers} "
                    f"requests={_node_requests(generation)}"
                )
                services.metrics.e2e_latency.observe(time.monotonic() - arrived)
            if reservation is not None:
                reservation.settle(plan.prompt_tokens if generation is not None else 0, answers)

    async def _read(
        self, scope: Scope, receive: Receive, exchange: HttpExchange, share: BodyShare, arrived: float
    ) -> tuple[Any, GenerationPlan]:
        services = self._services
        request = await read_body(scope, receive, self._endpoint.request_type, services.config, share)
        if self._endpoint.translate is not None:
            request = self._endpoint.translate(request)
        services.model.check_name(request.model)
        tenant = exchange.tenant
        trace = exchange.trace = services.traces.begin(
            exchange.request_id, scope["headers"], tenant.name if tenant is not None else None
        )
        read_at = time.monotonic()
        plan = await self._endpoint.plan(
            request, services.model, caller_of(scope, services, request, arrived)
        )
        if trace is not None:
            trace.began = arrived
            trace.span(TracePhase.READ, arrived, read_at)
            trace.prompt_tokens = plan.prompt_tokens
            trace.span(TracePhase.TOKENIZE, read_at, time.monotonic(), plan.prompt_tokens)
        return request, plan

    async def _answer(
        self,
        scope: Scope,
        send: Send,
        exchange: HttpExchange,
        request: Any,
        plan: GenerationPlan,
        generation: Generation,
    ) -> None:
        tokenizer = self._services.model.tokenizer
        choices = plan.choices(generation, tokenizer)
        head = AnswerHead.new(
            self._endpoint.id_prefix, int(time.time()), self._services.model.name_of(request.model)
        )
        trace = exchange.trace
        if trace is not None:
            trace.answer_id = head.id
        if request.stream:
            answer = self._endpoint.stream(head, plan, request, choices, tokenizer)
            await self._stream(scope, send, generation, choices, answer, trace)
            return
        read = await read_all(generation, choices)
        pieces = self._endpoint.whole(head, plan, request, read, tokenizer)
        await send_pieces(send, pieces, _routing_headers(generation))
        if trace is not None:
            trace.flushed(time.monotonic())

    async def _stream(
        self,
        scope: Scope,
        send: Send,
        generation: Generation,
        choices: Sequence[Choice],
        answer: AnswerStream,
        trace: RequestTrace | None,
    ) -> None:
        by_life = {choice.life: choice for choice in choices}
        unfinished = len(choices)
        unwritten: list[bytes] = []
        stream = EventStream(scope, send, _routing_headers(generation))

        def read(life: RequestLife) -> bytes:
            nonlocal unfinished
            choice = by_life[life]
            delta = choice.advance()
            if delta is None:
                return b""
            unfinished -= delta.finish_reason is not None
            events = answer.events(choice, delta)
            life.ledger.logprobs.forget(choice.completion_tokens)
            return events

        def show(life: RequestLife) -> bool:
            """Tokens in the middle of an answer, for a client that keeps up, are all that is shown from here."""
            if life.ended or not stream.begun:
                return False
            events = read(life)
            if not life.ended and stream.try_write(events):
                if trace is not None:
                    trace.flushed(time.monotonic())
                return True
            unwritten.append(events)
            return False

        async def flush(beyond: int = 0) -> None:
            """Writes what there is, once it is more than `beyond` bytes. Waits for a client that is behind."""
            if sum(map(len, unwritten)) <= beyond:
                return
            events = b"".join(unwritten)
            unwritten.clear()
            await stream.write(events)
            if trace is not None:
                trace.flushed(time.monotonic())

        generation.show_with(show)
        turn = LoopTurn()
        while unfinished:
            failure = None
            news = await generation.news()
            for life in news:
                unwritten.append(read(life))
                while by_life[life].behind:
                    await turn.pass_on()
                    unwritten.append(read(life))
                    await flush(WRITE_BYTES)
                failure = by_life[life].failed or failure
                await flush(WRITE_BYTES)
                await turn.pass_on()
            if failure is not None:
                if stream.begun:  # then every token that came is shown; else the failure is a status code
                    await flush()
                raise failure
            if unfinished:
                await flush()
        await stream.write(b"".join(unwritten) + answer.closing(), last=True)
        if trace is not None:
            trace.flushed(time.monotonic())


def caller_of(scope: Scope, services: Services, request: SamplingFields, arrived: float) -> Caller:
    exchange = exchange_of(scope)
    tenant = exchange.tenant
    session = next((v.decode("latin-1") for n, v in scope["headers"] if n == b"x-session-id"), None)
    if session is None and isinstance(request, ChatRequest):
        session = request.prompt_cache_key
    return Caller(
        label=exchange.request_id,
        deadline=arrived + services.config.timeouts.total,
        cache_salt=tenant.salted if tenant is not None else _unsalted,
        session=session[:256] if session else None,
        trace=exchange.trace,
        arrived=arrived,
    )


def _unsalted(cache_salt: str | None) -> str | None:
    return cache_salt


def _asked(request: Any, plan: GenerationPlan) -> list[int | None]:
    """How long each answer may be, None where the request does not say."""
    says = not isinstance(request, ChatRequest) or (
        request.max_tokens is not None or request.max_completion_tokens is not None
    )
    return list(asked_tokens(plan)) if says else [None] * len(plan.specs)


def asked_tokens(plan: GenerationPlan) -> list[int | None]:
    return [spec.sampling.max_tokens for spec in plan.specs]


def _node_requests(generation: Generation) -> str:
    """The ids that the nodes know it by, of its first choices: a line of the log is no list of everything."""
    names = [name for life in generation.lives for name in life.request_ids]
    more = len(names) - LOGGED_IDS
    return ",".join(names[:LOGGED_IDS]) + (f",… and {more} more" if more > 0 else "")


def _nodes(generation: Generation) -> str:
    """Every attempt's nodes in order; choices that went the same way are named once."""
    ways = {"|".join(decision.node_names for decision in life.decisions): None for life in generation.lives}
    return ";".join(ways)


def _routing_headers(generation: Generation) -> list[tuple[bytes, bytes]]:
    reasons = {life.decisions[-1].reason: None for life in generation.lives if life.decisions}
    return [
        (b"x-tandem-nodes", _header_value(_nodes(generation))),
        (b"x-tandem-decision", _header_value("; ".join(reasons))),
    ]


def _header_value(text: str) -> bytes:
    """Of at most a kilobyte. A space at its end, where it was cut, would make the whole answer one that cannot be sent."""
    return text.encode("ascii", "replace")[:1024].strip()
