"""POST /v1/completions, /v1/chat/completions and /v1/messages. `Delivery` streams an answer while it is
generated."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from tandem.api.openai.answer import AnswerHead, Choice, Delta, LoopTurn
from tandem.api.openai.caller import Caller
from tandem.api.openai.chat_answer import ChatStream, whole_chat
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.completion_answer import CompletionStream, whole_completion
from tandem.api.openai.completion_request import CompletionRequest
from tandem.api.openai.fields import SamplingFields
from tandem.api.openai.generation_plan import AnswerParts, GenerationPlan
from tandem.api.openai.plan import plan_chat, plan_completion
from tandem.api.openai.reading import ReadChoice, read_all
from tandem.api.openai.served_model import ServedModel
from tandem.api.sequence import SequenceSpec
from tandem.router.dispatch import Generation, RequestLife
from tandem.router.http.answer_notes import notes_of, routing_headers
from tandem.router.http.body import (
    PARSED_TIMES,
    SMALL_BODY,
    BodyShare,
    answer_size,
    beside,
    inputs_size,
    read_body,
    without_payload,
)
from tandem.router.http.exchange import EventStream, HttpExchange, send_bytes, send_pieces
from tandem.router.http.services import Services
from tandem.router.keys import Reservation
from tandem.router.tracer import GrowingTrace
from tandem.wire.tracing import TracePhase

WHEN_IDLE_S = 86400.0  # how long what runs when nothing else does may take; its batch ends it sooner
# How many bytes are written at once while an answer has more tokens than were read.
WRITE_BYTES = 64 << 10
MOST_NOTES = 2000  # of a connection's line in the log, which names its first answers


class TracedPlan(Protocol):
    """What a plan has that the request's trace tells."""

    @property
    def specs(self) -> list[SequenceSpec]: ...

    @property
    def prompt_tokens(self) -> int: ...


P = TypeVar("P", bound=TracedPlan)


class AnswerStream(Protocol):
    """How one API writes an answer as events."""

    def events(self, choice: Choice, delta: Delta) -> bytes: ...

    def closing(self) -> bytes: ...


class GenerateEndpoint(msgspec.Struct, frozen=True):
    """What differs between the APIs that generate."""

    id_prefix: str
    request_type: Any
    plan: Callable[[Any, ServedModel, Caller], Awaitable[GenerationPlan]]
    whole: Callable[[AnswerParts, Sequence[ReadChoice]], bytes | Iterator[bytes]]
    stream: Callable[[AnswerParts], AnswerStream]
    translate: Callable[[Any], Any] | None = None  # translates the API's request into a ChatRequest


COMPLETIONS = GenerateEndpoint("cmpl", CompletionRequest, plan_completion, whole_completion, CompletionStream)
CHAT = GenerateEndpoint("chatcmpl", ChatRequest, plan_chat, whole_chat, ChatStream)


async def generate(endpoint: GenerateEndpoint, services: Services, exchange: HttpExchange) -> None:
    with enter(services, exchange) as reservation:
        with services.bodies.share() as share:
            request, plan = await _read(endpoint, services, exchange, share)
            services.signer.check(exchange, plan, streams=bool(request.stream))
            services.quoter.check(exchange)
            kept_of_body = share.size
            if kept_of_body > SMALL_BODY:
                request, kept_of_body = without_payload(request), 0
        reservation.take_tokens(plan.prompt_tokens, _asked(request, plan))
        size = KeptSize(
            inputs_size(plan) + kept_of_body * PARSED_TIMES, answer_size(plan, streams=bool(request.stream))
        )

        async def work() -> None:
            eager = bool(request.stream or plan.stops)
            async with running(services, exchange, plan, reservation, size, eager=eager) as generation:
                try:
                    await _answer(endpoint, services, exchange, request, plan, generation)
                finally:
                    generation.turn_ended(plan.called)

        await exchange.until_disconnect(work)


class KeptSize(msgspec.Struct, frozen=True):
    """The bytes that a request keeps until its end."""

    inputs: int
    answer: int  # as far as they are known beforehand


@asynccontextmanager
async def running(
    services: Services,
    exchange: HttpExchange,
    plan: TracedPlan,
    reservation: Reservation,
    size: KeptSize,
    *,
    eager: bool,
) -> AsyncIterator[Generation]:
    """While it is entered, the plan is carried out. Afterwards nothing of it runs any more, and its tokens are counted. A request
    that no node had room for counts, too."""
    with services.kept.share(size.inputs + size.answer, exchange.owner) as kept:
        used, answers = 0, list[int]()
        try:
            generation = await services.dispatcher.generate(plan.specs, exchange.owner, eager=eager)
            used = plan.prompt_tokens
            try:
                kept.grows_with(generation, size.inputs)
                yield generation
            finally:
                generation.cancel()
                answers += [len(life.ledger.tokens) for life in generation.lives if life.spec.facts.pooling is None]
                if len(exchange.notes) < MOST_NOTES:
                    exchange.notes += notes_of(generation, used + sum(answers))
                services.quoter.ended(exchange, generation)
                services.metrics.e2e_latency.observe(time.monotonic() - exchange.arrived)
        finally:
            reservation.settle(used, answers)


async def _read(
    endpoint: GenerateEndpoint, services: Services, exchange: HttpExchange, share: BodyShare
) -> tuple[Any, GenerationPlan]:
    request = await read_body(exchange, endpoint.request_type, services.config, share)
    if endpoint.translate is not None:
        request = await beside(share, endpoint.translate, request)
    request = services.model.named_by(request)
    return request, await planned(endpoint.plan, services, exchange, request, exchange.request_id)


async def _answer(
    endpoint: GenerateEndpoint,
    services: Services,
    exchange: HttpExchange,
    request: Any,
    plan: GenerationPlan,
    generation: Generation,
) -> None:
    tokenizer = services.model.tokenizer
    head = AnswerHead.new(endpoint.id_prefix, int(time.time()), services.model.name_of(request.model))
    parts = AnswerParts(head, plan, request, plan.choices(generation, tokenizer), tokenizer)
    trace = exchange.trace
    if trace is not None:
        trace.answer_id = head.id
    quoted = services.quoter.headers(exchange, generation)
    if request.stream:
        stream = EventStream(exchange, routing_headers(generation) + quoted)
        if quoted:
            await stream.write(b"")  # it must arrive before the first token
        await Delivery(generation, parts.choices, endpoint.stream(parts), stream, trace).run()
        return
    read = await read_all(generation, parts.choices)
    headers = routing_headers(generation) + quoted + services.signer.headers(exchange, plan, generation, read)
    whole = endpoint.whole(parts, read)
    if isinstance(whole, bytes):
        await send_bytes(exchange.send, whole, b"application/json", headers=headers)
    else:
        await send_pieces(exchange.send, whole, headers)
    if trace is not None:
        trace.flushed(time.monotonic())


class Delivery:
    """Streams one answer to its client, whichever API it belongs to.

    Tokens in the middle of an answer, for a client that keeps up, are written by `_show`, in the inbox's
    handler, because waking this task would cost as much as everything else that is done with a token. The
    task writes everything else: the beginning, the end, failures, and to a client that is behind.
    """

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        answer: AnswerStream,
        stream: EventStream,
        trace: GrowingTrace | None = None,
    ) -> None:
        self._generation = generation
        self._by_life = {choice.life: choice for choice in choices}
        self._answer = answer
        self._stream = stream
        self._trace = trace
        self._unfinished = len(choices)
        self._unwritten: list[bytes] = []

    async def run(self) -> None:
        """Runs to the answer's end. Raises a choice's failure, after writing what came before it if the
        stream has begun."""
        self._generation.show_with(self._show)
        try:
            await self._deliver()
        finally:
            self._generation.show_with(None)

    async def _deliver(self) -> None:
        turn = LoopTurn()
        while self._unfinished:
            failure = None
            news = await self._generation.news()
            turn.begin()
            for life in news:
                choice = self._by_life[life]
                self._read(life)
                while choice.behind:
                    await turn.pass_on()
                    self._read(life)
                    await self._flush(WRITE_BYTES)
                failure = choice.failed or failure
                await self._flush(WRITE_BYTES)
                await turn.pass_on()
            if failure is not None:
                if self._stream.begun:
                    await self._flush()
                raise failure
            if self._unfinished:
                await self._flush()
        await self._stream.write(b"".join(self._unwritten) + self._answer.closing(), last=True)
        self._note_written()

    def _show(self, life: RequestLife) -> bool:
        """Writes the tokens that just arrived. Returns False when the task must write them."""
        if life.ended or not self._stream.begun or self._unwritten:
            return False
        self._read(life)
        events = b"".join(self._unwritten)
        # Reading may have found a stop string, which ends the life.
        if life.ended or not self._stream.try_write(events):
            return False
        self._unwritten.clear()
        self._note_written()
        return True

    def _read(self, life: RequestLife) -> None:
        choice = self._by_life[life]
        delta = choice.advance()
        if delta is None:
            return
        self._unfinished -= delta.finish_reason is not None
        self._unwritten.append(self._answer.events(choice, delta))
        life.ledger.logprobs.forget(choice.completion_tokens)

    async def _flush(self, beyond: int = 0) -> None:
        """Writes what is unwritten if it is more than `beyond` bytes. Waits for a client that is behind."""
        if sum(map(len, self._unwritten)) <= beyond:
            return
        events = b"".join(self._unwritten)
        self._unwritten.clear()
        await self._stream.write(events)
        self._note_written()

    def _note_written(self) -> None:
        if self._trace is not None:
            self._trace.flushed(time.monotonic())


def enter(services: Services, exchange: HttpExchange) -> Reservation:
    """Counts a request for its tenant."""
    services.refuse_when_draining()
    # What runs when nothing else does uses no quota: a key's batches would keep its own users out.
    return Reservation(None) if exchange.tenant is None or exchange.when_idle else exchange.tenant.enter()


async def planned(
    make_plan: Callable[[Any, ServedModel, Caller], Awaitable[P]],
    services: Services,
    exchange: HttpExchange,
    request: object,
    trace_name: str,
) -> P:
    """Makes the plan of a parsed request, and begins its trace if it gets one. `trace_name`: an id that the client knows."""
    exchange.trace = None
    if services.tracer.draws or exchange.asks_for_trace:
        tenant = exchange.tenant.name if exchange.tenant is not None else None
        exchange.trace = services.tracer.begin(trace_name, exchange.headers, tenant)
    trace, read_at = exchange.trace, time.monotonic()
    plan = await make_plan(request, services.model, caller_of(services, exchange, request))
    if trace is not None:
        trace.began = exchange.arrived
        trace.span(TracePhase.READ, exchange.arrived, read_at)
        facts = plan.specs[0].facts
        trace.planned(plan.prompt_tokens, facts.sampling if facts.pooling is None else None)
        trace.span(TracePhase.TOKENIZE, read_at, time.monotonic(), plan.prompt_tokens)
    return plan


def caller_of(services: Services, exchange: HttpExchange, request: object) -> Caller:
    tenant, arrived = exchange.tenant, exchange.arrived
    session = _header(exchange, b"x-session-id")
    if session is None and isinstance(request, ChatRequest):
        session = request.prompt_cache_key
    # A session is a job whose last turn is not announced.
    job_id = (_header(exchange, b"x-job-id") or session or "")[:256]
    is_last_step = (_header(exchange, b"x-last-step") or "").lower() in ("1", "true")
    if isinstance(request, SamplingFields):
        job_id = request.job_id or job_id
        is_last_step = is_last_step if request.is_last_step is None else request.is_last_step
    return Caller(
        label=exchange.request_id,
        deadline=arrived + (WHEN_IDLE_S if exchange.when_idle else services.config.timeouts.total),
        cache_salt=tenant.salted if tenant is not None else lambda salt: salt,
        session=session[:256] if session else None,
        job_id=(tenant.salted(job_id) if tenant is not None else job_id) if job_id else None,
        is_last_step=is_last_step,
        most_urgent=tenant.most_urgent if tenant is not None else None,
        trace=exchange.trace,
        arrived=arrived,
        key=tenant.name if tenant is not None else None,
        when_idle=exchange.when_idle,
        first_by=exchange.first_by,
    )


def _header(exchange: HttpExchange, name: bytes) -> str | None:
    value = exchange.header(name)
    return value.decode("latin-1") if value is not None else None


def _asked(request: Any, plan: GenerationPlan) -> list[int | None]:
    """Returns the most tokens of each answer, or None for each if the request does not say."""
    says = not isinstance(request, ChatRequest) or (
        request.max_tokens is not None or request.max_completion_tokens is not None
    )
    return list(asked_tokens(plan)) if says else [None] * len(plan.specs)


def asked_tokens(plan: GenerationPlan) -> list[int | None]:
    return [spec.facts.sampling.max_tokens for spec in plan.specs]
