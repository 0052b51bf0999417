"""Reads a request's body within limits of type, size and time, then parses and checks it.

The memory of all requests together is bounded, too: their bodies while they are read, and what is kept of
each until its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from tandem.api.field_table import FieldTable
from tandem.api.json_body import parse_object, read_request
from tandem.api.lives import ReadableLives
from tandem.api.openai.fields import StreamOptions
from tandem.api.openai.generation_plan import GenerationPlan
from tandem.base.errors import Cancelled, InvalidRequest, Overloaded, TandemError
from tandem.base.shares import OneAtATime, Shares
from tandem.http_server.turns import Turns
from tandem.router.config import Limits, RouterConfig, Timeouts, UnknownFields
from tandem.router.http.errors import BodyTimeout, BodyTooLarge, UnsupportedContentType
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.request_fields import FIELDS

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
T = TypeVar("T")


class BodyBudget:
    """Limits the bytes of all bodies that are being read, and each key's share of them (`shares`). Only bytes
    that have arrived count, so announcing a large body takes no room from other requests."""

    def __init__(self, limits: Limits, on_refused: Callable[[], None]) -> None:
        # Alone, a body may always have its full size.
        self._shares = Shares(limits.body_bytes_at_once, alone=limits.body_bytes)
        self._on_refused = on_refused
        # Large bodies are parsed one at a time: several threads would leave the event loop little of the
        # interpreter.
        self._parsing = asyncio.Semaphore(1)
        self._of_owner = OneAtATime()
        self.turns = Turns()  # for pieces of bodies to be taken

    @property
    def held(self) -> int:
        return self._shares.held

    def share(self) -> BodyShare:
        """Returns one request's share, a context manager that gives back all that it took."""
        return BodyShare(self)

    @asynccontextmanager
    async def parsing(self, owner: str) -> AsyncIterator[None]:
        """Waits for the turn of one large body. Of each owner's only one stands in the line, so owners take turns."""
        async with self._of_owner.turn(owner), self._parsing:
            yield

    def take(self, owner: str, size: int, has: int) -> None:
        if not self._shares.fits(owner, size, has=has):
            self._on_refused()
            raise Overloaded(
                f"the requests that are being read take up {self._shares.part(size)} {self._shares.limit} bytes for them: "
                "send this one again a little later"
            )
        self._shares.take(owner, size)

    def give_back(self, owner: str, size: int) -> None:
        self._shares.take(owner, -size)


class BodyShare:
    """One request's share of a BodyBudget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._owner = ""
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_no_concern: object) -> None:
        self._budget.give_back(self._owner, self.size)

    def parsing(self) -> AbstractAsyncContextManager[None]:
        return self._budget.parsing(self._owner)

    async def turn(self) -> None:
        await self._budget.turns.turn()

    def take(self, owner: str, size: int) -> None:
        """Counts more bytes of this owner's request. Raises Overloaded when there is no room for them."""
        self._budget.take(owner, size, self.size)
        self._owner = owner
        self.size += size


class KeptMemory:
    """Limits the memory that running and waiting requests keep, and each key's share of it (`shares`). A
    request is admitted if what it is known to keep fits. The answers' growth is measured regularly: it keeps
    new requests out. Beyond the limit, or a key's half of it, the key's largest request is ended."""

    def __init__(self, limit: int, on_refused: Callable[[], None]) -> None:
        self._amounts = Shares(limit, alone=limit // 2)
        self._on_refused = on_refused
        self._shares: set[KeptShare] = set()

    @property
    def held(self) -> int:
        return self._amounts.held

    def share(self, size: int, owner: str) -> KeptShare:
        """Returns one request's share, a context manager that holds it. Raises InvalidRequest for a request
        that could never fit, and Overloaded for one that does not fit now."""
        most = self._most(owner)
        if size > most:
            self._on_refused()
            whose = "that one key may have" if owner else "that all requests have together"
            raise InvalidRequest(
                f"the request would take {size} bytes of the router's memory, more than the {most} {whose} "
                "(router.limits.kept_bytes): ask for fewer choices, tokens, or log-probabilities"
            )
        self.check(owner, size, has=0)
        return KeptShare(self, size, owner)

    def check(self, owner: str, size: int, *, has: int) -> None:
        """Raises Overloaded when there is no room for this much more. `has`: what the same share holds."""
        if not self._amounts.fits(owner, size, has=has):
            self._on_refused()
            raise Overloaded(
                f"running requests take up {self._amounts.part(size)} {self._amounts.limit} bytes for them (router.limits.kept_bytes); "
                "send this one again a little later"
            )

    def _most(self, owner: str) -> int:
        return self._amounts.limit // 2 if owner else self._amounts.limit

    def add(self, share: KeptShare) -> None:
        self._shares.add(share)
        self._amounts.take(share.owner, share.size)

    def remove(self, share: KeptShare) -> None:
        self._shares.discard(share)
        self._amounts.take(share.owner, -share.size)

    def change(self, share: KeptShare, size: int) -> None:
        self._amounts.take(share.owner, size - share.size)
        share.size = size

    def measure(self) -> None:
        for share in self._shares:
            share.measure()
        owners = {share.owner for share in self._shares}
        over = [owner for owner in owners if self._amounts.of(owner) > self._most(owner)]
        if not over and self.held > self._amounts.limit:
            over = [max(owners, key=self._amounts.of)]
        for owner in over:
            self._on_refused()
            largest = max((share for share in self._shares if share.owner == owner), key=lambda share: share.size)
            largest.end(
                Overloaded(
                    f"the answers have outgrown router.limits.kept_bytes, and this one is the largest, with {largest.size} bytes"
                )
            )


class KeptShare:
    """One request's memory: what it was admitted with, or what its answer has grown to, if that is more."""

    def __init__(self, memory: KeptMemory, size: int, owner: str) -> None:
        self._memory = memory
        self.owner = owner
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
                TOKEN_BYTES * len(life.ledger.tokens) + life.ledger.logprobs.nbytes for life in self._generation.lives
            )
            self._memory.change(self, max(self._at_first, self._inputs + answer))

    def grow(self, size: int) -> None:
        """Counts more, of something without a generation. Raises Overloaded when there is no room for it."""
        self._memory.check(self.owner, size, has=self.size)
        self._memory.change(self, self.size + size)

    def shrink(self, size: int) -> None:
        self._memory.change(self, self.size - size)

    def end(self, error: TandemError) -> None:
        if self._generation is not None:
            for life in self._generation.lives:
                life.fail(error)


def inputs_size(plan: GenerationPlan) -> int:
    """What a request keeps until its end, besides its answer."""
    facts = plan.specs[0].facts
    sampling = facts.sampling
    return (
        TOKEN_BYTES * plan.prompt_tokens
        + sum(map(len, facts.images))
        + (0 if facts.embeds is None else _embeds_size(plan))
        + sum(map(len, plan.prompt_texts))
        + SEQUENCE_BYTES * len(plan.specs)
        + len(sampling.grammar or "")
        + ENTRY_BYTES * (len(sampling.logit_bias) + sum(map(len, sampling.bad_words)))
        + sum(map(len, plan.stops))
    )


def _embeds_size(plan: GenerationPlan) -> int:
    """The prompts are all of embeddings, or none is."""
    rows = [spec.facts.embeds for spec in plan.specs[:: plan.choices_per_prompt]]
    return sum(len(each.data) for each in rows if each is not None)


def answer_size(plan: GenerationPlan, *, streams: bool) -> int:
    """The part of the answer's size that is known beforehand: log-probabilities that are shown only at the
    end."""
    size = 0
    for spec in plan.specs:
        sampling = spec.facts.sampling
        if sampling.prompt_logprobs is not None:
            size += len(spec.facts.prompt_token_ids) * (1 + sampling.prompt_logprobs) * ENTRY_BYTES
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
    exchange: HttpExchange, request_type: type[R], config: RouterConfig, share: BodyShare, fields: FieldTable = FIELDS
) -> R:
    """Reads and checks a body of JSON. `fields` has the path's request type."""
    _check_type(exchange, config)
    body = await _read(exchange, config.limits, config.timeouts, share)
    if len(body) <= INLINE_BYTES:
        request, ignored = _request_of(body, request_type, config, fields)
    else:
        async with share.parsing():
            request, ignored = await asyncio.to_thread(_request_of, body, request_type, config, fields)
    exchange.ignored_fields = ignored
    if config.other_models and getattr(request, "model", None) in config.other_models:
        exchange.body = body
    return request


async def beside(share: BodyShare, work: Callable[..., T], *args: Any) -> T:
    """Does what takes long with all of a request, here if its body was short, and otherwise in a thread."""
    if share.size <= INLINE_BYTES:
        return work(*args)
    async with share.parsing():
        return await asyncio.to_thread(work, *args)


async def read_bytes(exchange: HttpExchange, config: RouterConfig, share: BodyShare) -> bytes | bytearray:
    """Reads a JSON body that the caller parses itself."""
    _check_type(exchange, config)
    return await _read(exchange, config.limits, config.timeouts, share)


def _request_of(
    body: bytes | bytearray, request_type: type[R], config: RouterConfig, fields: FieldTable
) -> tuple[R, list[str]]:
    value = parse_object(body, config.limits)
    refuse_unknown = config.unknown_fields is UnknownFields.REFUSE
    return read_request(value, request_type, fields, refuse_unknown=refuse_unknown)


def _check_type(exchange: HttpExchange, config: RouterConfig) -> None:
    declared = exchange.header(b"content-type")
    if declared is None:
        # A browser asks before it sends JSON for another site's page, but not before it sends a body without
        # a type. A key would be missing; without keys, nothing else stops it.
        if exchange.tenant is None and exchange.is_from_elsewhere(config.cors_origins):
            raise UnsupportedContentType(
                "content-type: must be application/json where another site's page asks; "
                "router.cors_origins names the pages that may"
            )
        return
    if declared == b"application/json" and exchange.header(b"content-encoding") is None:
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
        raise UnsupportedContentType(f"content-encoding: {encoding.decode('latin-1')[:40]!r} is not read here")


async def _read(exchange: HttpExchange, limits: Limits, timeouts: Timeouts, share: BodyShare) -> bytes | bytearray:
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
        share.take(exchange.owner, len(whole))
        return whole
    body = bytearray()
    more, fits = True, True
    try:
        async with asyncio.timeout(timeouts.body):
            while more and fits:
                await share.turn()
                message = await _next(exchange.receive)
                data = message.get("body", b"")
                more = message.get("more_body", False)
                fits = len(body) + len(data) <= limits.body_bytes
                if fits:
                    share.take(exchange.owner, len(data))
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
