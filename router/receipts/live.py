"""POST /verify: asks some of the clients' requests again, of nodes that a rollout brings, and compares the answers bit by bit.

A request is asked again as it was, as far as it was answered; nothing of it leaves the router but where two answers part. It is listened
only while an operator waits for the answer, so there is nothing to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec

from tandem.api.field_table import FieldTable, PathFields
from tandem.api.sequence import SequenceSpec
from tandem.base.errors import InvalidRequest, TandemError
from tandem.router.dispatch.ledger import TokenLedger
from tandem.router.dispatch.life import RequestLife
from tandem.router.http.body import read_body
from tandem.router.http.exchange import HttpExchange, send_json
from tandem.router.http.services import Services
from tandem.wire.sampling import FinishReason

_MOST_AGAIN = 4  # for each call, so that clients lose little
_MOST_S = 60.0  # to listen, and to answer again


class AskAgain(msgspec.Struct, frozen=True):
    old: list[str]  # the nodes that served before; requests that they answer are asked again of others
    seconds: float = 2.0  # how long to listen, at most


_FIELDS = FieldTable((PathFields("/verify", AskAgain),))


class AskedAgain(msgspec.Struct, frozen=True):
    compared: int  # answers
    tokens: int
    difference: str  # where two answers part first, and who gave them; "" for the same bits


async def ask_again(services: Services, exchange: HttpExchange) -> None:
    exchange.require_operator(services.keys)
    with services.bodies.share() as share:
        asked = await read_body(exchange, AskAgain, services.config, share, _FIELDS)
    if not 0 < asked.seconds <= _MOST_S:
        raise InvalidRequest(f"seconds must be over 0 and at most {_MOST_S:g}, not {asked.seconds:g}", "seconds")
    old, found = frozenset(asked.old), list[_Compared]()
    for life in await _heard(services, asked, old):
        if (compared := await _again(services, life, old, exchange.owner)) is not None:
            found.append(compared)
    tokens, differences = (list(each) for each in zip(*found, strict=True)) if found else ([], [])
    difference = next(filter(None, differences), "")
    await send_json(exchange.send, AskedAgain(len(found), sum(tokens), difference))


_Compared = tuple[int, str]  # tokens, and where they part


async def _heard(services: Services, asked: AskAgain, old: frozenset[str]) -> list[RequestLife]:
    """Returns some of the requests that these nodes answer meanwhile. Without a new node that writes answers there are none."""
    if all(view.node_id in old for view in services.pool.view.snapshot().decode):
        return []
    heard, enough = list[RequestLife](), asyncio.Event()

    def hear(lives: Iterable[RequestLife]) -> None:
        for life in lives:
            well = life.finish in (FinishReason.STOP, FinishReason.LENGTH) and bool(life.ledger.tokens)
            if well and len(heard) < _MOST_AGAIN and _nodes_of(life) <= old:
                heard.append(life)
        if len(heard) == _MOST_AGAIN:
            enough.set()

    services.dispatcher.on_answered.add(hear)
    try:
        async with asyncio.timeout(asked.seconds):
            await enough.wait()
    except TimeoutError:
        pass
    finally:
        services.dispatcher.on_answered.discard(hear)
    return heard


def _nodes_of(life: RequestLife) -> set[str]:
    return {
        node.node_id for decision in life.decisions for node in (decision.prefill, decision.decode) if node is not None
    }


async def _again(services: Services, life: RequestLife, old: frozenset[str], owner: str) -> _Compared | None:
    """Returns None if no new node answered."""
    facts, count = life.spec.facts, len(life.ledger.tokens)
    # A client's stop string may have ended it, which nodes do not know.
    sampling = msgspec.structs.replace(
        facts.sampling, max_tokens=count, min_tokens=min(facts.sampling.min_tokens, count)
    )
    spec = SequenceSpec(
        label=f"{life.spec.label}-again",
        facts=msgspec.structs.replace(facts, sampling=sampling, job_id=None),
        deadline=time.monotonic() + _MOST_S,
        answered_by=old,
    )
    try:
        generation = await services.dispatcher.generate([spec], owner, eager=False)
    except TandemError:
        return None
    try:
        (again,) = await generation.news()
    finally:
        generation.cancel()
    if again.error is not None or not old.isdisjoint(_nodes_of(again)):
        return None
    part = _part(life.ledger, again.ledger)
    who = f"{', '.join(sorted(_nodes_of(life)))} and {', '.join(sorted(_nodes_of(again)))}"
    return count, f"a client's request {life.spec.label}, {part}, answered by {who}" if part else ""


def _part(one: TokenLedger, other: TokenLedger) -> str:
    """Where two answers part first; "" for the same bits. A log-probability counts that the client asked for and is still here."""
    for at, token in enumerate(one.tokens):
        theirs = other.tokens[at] if at < len(other.tokens) else None
        if token != theirs:
            return f"token {at} of the answer: tokens {token} and {theirs}"
        first, second = _row(one, at), _row(other, at)
        if first is not None and second is not None and first != second:
            return f"token {at} of the answer: log-probabilities {first[1]} and {second[1]}"
    return ""


def _row(ledger: TokenLedger, at: int) -> tuple[list[int], list[float]] | None:
    try:
        ids, values = ledger.logprobs.row(at)
    except IndexError:
        return None
    return list(ids), list(values)
