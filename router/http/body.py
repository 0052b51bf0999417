"""Reads a request's body within limits of type, size and time, then parses and checks it.

The memory of all requests together is bounded, too: their bodies while they are read, and what is kept of
each until its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from tandem.router.config import Limits, RouterConfig, Timeouts
from tandem.router.dispatch import ReadableLives
from tandem.router.http.errors import BodyTimeout, BodyTooLarge, UnsupportedContentType
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.json_body import parse_object, read_request
from tandem.router.openai.fields import StreamOptions
from tandem.router.openai.plan import GenerationPlan
from tandem.wire.errors import Cancelled, InvalidRequest, Overloaded, TandemError

# Bytes that Python needs, measured with sys.getsizeof: for a token in a list, for an entry of a dict of
# numbers, and for all that belongs to one sequence besides its tokens.
TOKEN_BYTES = 36
ENTRY_BYTES = 100
SEQUENCE_BYTES = 8 << 10
LONG_TEXT = 256
# A body up to this size is kept until the request's end; a larger one is dropped once its plan is made.
SMALL_BODY = 4 << 10
PARSED_TIMES = 8  # how much more memory a parsed body takes than its bytes
LOGPROB_BYTES = 16  # an id and a number, in arrays

R = TypeVar("R", bound=msgspec.Struct)


class BodyBudget:
    """Limits the bytes of all bodies that are being read. Only bytes that have arrived count, so announcing a
    large body takes no room from other requests."""

    def __init__(self, limit: int, on_refused: Callable[[], None]) -> None:
        self._limit = limit
        self._on_refused = on_refused
        self.held = 0
        # Large bodies are parsed one at a time: several threads would leave the event loop little of the
        # interpreter.
        self.parsing = asyncio.Semaphore(1)

    def share(self) -> BodyShare:
        """Returns one request's share, a context manager that gives back all that it took."""
        return BodyShare(self)

    def take(self, size: int) -> None:
        if self.held + size > self._limit:
            self._on_refused()
            raise Overloaded(
                f"the requests that are being read take up all {self._limit} bytes for them "
                "(router.limits.body_bytes_at_once); send this one again a little later"
            )
        self.held += size


class BodyShare:
    """One request's share of a BodyBudget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_no_concern: object) -> None:
        self._budget.held -= self.size

    @property
    def parsing(self) -> asyncio.Semaphore:
        return self._budget.parsing

    def take(self, size: int) -> None:
        """Counts more bytes. Raises Overloaded when there is no room for them."""
        self._budget.take(size)
        self.size += size


class KeptMemory:
    """Limits the memory that running and waiting requests keep. A request is admitted if what it is known to
    keep fits. The answers' growth is measured regularly: it keeps new requests out, and beyond the limit the
    largest request is ended."""

    def __init__(self, limit: int, on_refused: Callable[[], None]) -> None:
        self._limit = limit
        self._on_refused = on_refused
        self._shares: set[KeptShare] = set()
        self.held = 0

    def share(self, size: int) -> KeptShare:
        """Returns one request's share, a context manager that holds it. Raises InvalidRequest for a request
        that could never fit, and Overloaded for one that does not fit now."""
        if size > self._limit:
            self._on_refused()
            raise InvalidRequest(
                f"the request would take {size} bytes of the router's memory, more than the {self._limit} that all "
                "requests have together (router.limits.kept_bytes): ask for fewer choices, tokens, or log-probabilities"
            )
        if self.held + size > self._limit:
            self._on_refused()
            raise Overloaded(
                f"running requests take up all {self._limit} bytes for them (router.limits.kept_bytes); "
                "send this one again a little later"
            )
        return KeptShare(self, size)

    def add(self, share: KeptShare) -> None:
        self._shares.add(share)
        self.held += share.size

    def remove(self, share: KeptShare) -> None:
        self._shares.discard(share)
        self.held -= share.size

    def measure(self) -> None:
        for share in self._shares:
            share.measure()
        self.held = sum(share.size for share in self._shares)
        if self.held > self._limit:
            self._on_refused()
            largest = max(self._shares, key=lambda share: share.size)
            largest.end(
                Overloaded(
                    f"the answers have outgrown router.limits.kept_bytes, and this one is the largest, with {largest.size} bytes"
                )
            )


class KeptShare:
    """One request's memory: what it was admitted with, or what its answer has grown to, if that is more."""

    def __init__(self, memory: KeptMemory, size: int) -> None:
        self._memory = memory
        self._at_first = size
        self._inputs = size
        self._generation: ReadableLives | None = None
        self.size = size

    def __enter__(self) -> Self:
        self._memory.add(self)
        return self

    def __exit__(self, *of_no_concern: object) -> None:
        self._memory.remove(self)

    def grows_with(self, generation: ReadableLives, inputs: int) -> None:
        """Measures this request's answer from now on. `inputs`: what it keeps besides."""
        self._generation, self._inputs = generation, inputs

    def measure(self) -> None:
        if self._generation is not None:
            answer = sum(
                TOKEN_BYTES * len(life.ledger.tokens) + life.ledger.logprobs.nbytes
                for life in self._generation.lives
            )
            self.size = max(self._at_first, self._inputs + answer)

    def end(self, error: TandemError) -> None:
        if self._generation is not None:
            for life in self._generation.lives:
                life.fail(error)


def inputs_size(plan: GenerationPlan) -> int:
    """What a request keeps until its end, besides its answer."""
    sampling = plan.specs[0].sampling
    return (
        TOKEN_BYTES * plan.prompt_tokens
        + sum(map(len, plan.specs[0].images))
        + sum(
            len(embeds.data)
            for spec in plan.specs[:: plan.choices_per_prompt]
            if (embeds := spec.embeds) is not None
        )
        + sum(map(len, plan.prompt_texts))
        + SEQUENCE_BYTES * len(plan.specs)
        + len(sampling.grammar or "")
        + ENTRY_BYTES * (len(sampling.logit_bias) + sum(map(len, sampling.bad_words)))
        + sum(map(len, plan.stops))
    )


def answer_size(plan: GenerationPlan, *, streams: bool) -> int:
    """The part of the answer's size that is known beforehand: log-probabilities that are shown only at the
    end."""
    size = 0
    for spec in plan.specs:
        sampling = spec.sampling
        if sampling.prompt_logprobs is not None:
            size += len(spec.prompt_token_ids) * (1 + sampling.prompt_logprobs) * ENTRY_BYTES
        if sampling.logprobs is not None and not streams:
            size += sampling.max_tokens * (2 + sampling.logprobs) * LOGPROB_BYTES
    return size


def without_payload(request: R) -> R:
    """Returns the request without its lists, objects and long texts. The plan holds what the answer needs of
    them."""
    emptied: dict[str, Any] = {}
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if isinstance(value, list | dict) or (isinstance(value, str) and len(value) > LONG_TEXT):
            emptied[name] = type(value)()
        elif isinstance(value, msgspec.Struct) and not isinstance(value, StreamOptions):
            emptied[name] = None
    return msgspec.structs.replace(request, **emptied)


# Parsing a larger body takes at least a millisecond, so a thread does it.
INLINE_BYTES = 64 << 10


async def read_body(
    exchange: HttpExchange, request_type: type[R], config: RouterConfig, share: BodyShare
) -> R:
    _check_type(exchange)
    body = await _read(exchange, config.limits, config.timeouts, share)
    if len(body) <= INLINE_BYTES:
        request, ignored = _request_of(body, request_type, config)
    else:
        async with share.parsing:
            request, ignored = await asyncio.to_thread(_request_of, body, request_type, config)
    exchange.ignored_fields = ignored
    if config.other_models and getattr(request, "model", None) in config.other_models:
        exchange.body = body
    return request


async def read_bytes(exchange: HttpExchange, config: RouterConfig, share: BodyShare) -> bytes | bytearray:
    """Reads a JSON body that the caller parses itself."""
    _check_type(exchange)
    return await _read(exchange, config.limits, config.timeouts, share)


def _request_of(body: bytes | bytearray, request_type: type[R], config: RouterConfig) -> tuple[R, list[str]]:
    value = parse_object(body, config.limits)
    return read_request(value, request_type, config.unknown_fields)


def _check_type(exchange: HttpExchange) -> None:
    declared = exchange.header(b"content-type")
    if declared is None or (declared == b"application/json" and exchange.header(b"content-encoding") is None):
        return
    kind, _, parameters = declared.decode("latin-1").partition(";")
    if kind.strip().lower() != "application/json":
        raise UnsupportedContentType(f"content-type: must be application/json, not {kind.strip()[:100]!r}")
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8"):
            raise UnsupportedContentType(f"content-type: JSON is UTF-8, not {value.strip()[:40]!r}")
    encoding = exchange.header(b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise UnsupportedContentType(
            f"content-encoding: {encoding.decode('latin-1')[:40]!r} is not read here"
        )


async def _read(
    exchange: HttpExchange, limits: Limits, timeouts: Timeouts, share: BodyShare
) -> bytes | bytearray:
    declared = exchange.header(b"content-length")
    if declared is not None and (not declared.isdigit() or int(declared) > limits.body_bytes):
        if not declared.isdigit():
            raise InvalidRequest("content-length: must be a number")
        raise BodyTooLarge(f"the body has {int(declared)} bytes; at most {limits.body_bytes} are read")
    # Most bodies arrive together with their head, and need no wait and no timer.
    whole = exchange.connection.whole_body()
    if whole is not None:
        if len(whole) > limits.body_bytes:
            raise BodyTooLarge(f"the body has {len(whole)} bytes; at most {limits.body_bytes} are read")
        share.take(len(whole))
        return whole
    body = bytearray()
    more, fits = True, True
    try:
        async with asyncio.timeout(timeouts.body):
            while more and fits:
                message = await _next(exchange.receive)
                data = message.get("body", b"")
                more = message.get("more_body", False)
                fits = len(body) + len(data) <= limits.body_bytes
                if fits:
                    share.take(len(data))
                    body += data
    except TimeoutError:
        raise BodyTimeout(f"the body was not complete within {timeouts.body:g} s") from None
    if fits:
        return body
    raise BodyTooLarge(f"the body has more than the {limits.body_bytes} bytes that are read")


async def _next(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Cancelled("the client went away before its body was complete") from ClientDisconnect()
    return message
