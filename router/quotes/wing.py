"""Quotes for requests that ask for one, and whether each was kept."""

from __future__ import annotations

import math

import msgspec

from tandem.base.errors import Cancelled
from tandem.router.dispatch import Dispatcher, Generation, RequestLife
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.services import Services
from tandem.router.promises import QUOTE_HEADER, FirstTokenQuoter, refused
from tandem.router.quotes.first_tokens import FirstTokenTimes, Outlook, needed
from tandem.router.wings import RouterWing

LOWEST, HIGHEST = 0.5, 0.99
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")


class FirstTokenQuote(msgspec.Struct, frozen=True):
    """What one request was told."""

    confidence: float
    by_s: float | None  # seconds after the request's arrival; None: not known


class QuoteMaker(FirstTokenQuoter):
    """Learns from the first token of every request, quoted or not."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._metrics = dispatcher.metrics
        self._clock = dispatcher.placement.clock
        self._times = FirstTokenTimes()
        self._outlooks: dict[RequestLife, Outlook] = {}  # of quoted requests that wait for their first token
        self._told: dict[HttpExchange, FirstTokenQuote] = {}  # requests that have not ended
        dispatcher.on_begun.add(self._observe)

    def _observe(self, life: RequestLife) -> None:
        timings, expected_s = life.timings, life.decisions[0].first_token_s
        if expected_s is not None and timings.submitted_at is not None and timings.first_token_at is not None:
            took_s = timings.first_token_at - timings.submitted_at
            self._times.observe(expected_s, took_s)
            if (outlook := self._outlooks.pop(life, None)) is not None:
                self._times.learn(outlook, took_s)

    def quote(self, life: RequestLife, confidence: float) -> FirstTokenQuote:
        """Called when the request's first attempt was sent."""
        timings, expected_s = life.timings, life.decisions[0].first_token_s
        if expected_s is None or timings.submitted_at is None:
            return FirstTokenQuote(confidence, None)
        outlook = self._times.outlook(expected_s)
        if (within_s := self._times.within_s(outlook, confidence)) is None:
            return FirstTokenQuote(confidence, None)
        self._outlooks[life] = outlook
        return FirstTokenQuote(confidence, timings.submitted_at - timings.arrived_at + within_s)

    def check(self, exchange: HttpExchange) -> None:
        if _confidence(exchange) is not None and exchange.route not in _PATHS:
            raise refused(QUOTE_HEADER, f"is of answers at {', '.join(_PATHS)}")

    def headers(self, exchange: HttpExchange, generation: Generation) -> list[tuple[bytes, bytes]]:
        if (confidence := _confidence(exchange)) is None:
            return []
        life = generation.lives[0]
        self._told[exchange] = quote = self.quote(life, confidence)
        if quote.by_s is not None:
            text = f"first-token-by={math.ceil(quote.by_s * 1000) / 1000:.3f}; confidence={confidence:g}"
        else:
            why = "few-requests" if life.decisions[0].first_token_s is not None else "no-rate"
            counts = f"requests={len(self._times)}; needed={needed(confidence)}"
            text = f"unknown; confidence={confidence:g}; why={why}; {counts}"
        return [(QUOTE_HEADER, text.encode())]

    def ended(self, exchange: HttpExchange, generation: Generation) -> None:
        if (quote := self._told.pop(exchange, None)) is None:
            return
        life = generation.lives[0]
        self._outlooks.pop(life, None)
        first_at, arrived_at = life.timings.first_token_at, life.timings.arrived_at
        if quote.by_s is None:
            outcome = "unknown"
        elif (self._clock() if first_at is None else first_at) - arrived_at > quote.by_s:
            outcome = "missed"
        elif first_at is not None:
            outcome = "kept"
        elif isinstance(life.error, Cancelled):
            return  # its client left before that could be told
        else:
            outcome = "missed"  # it failed
        self._metrics.quotes.inc(f"{quote.confidence:g}", outcome)


def _confidence(exchange: HttpExchange) -> float | None:
    """The confidence that the request asks for, in hundredths."""
    asked = exchange.header(QUOTE_HEADER)
    if asked is None:
        return None
    try:
        given = float(asked)
    except ValueError:
        given = math.nan
    confidence = round(given, 2)
    if not LOWEST <= confidence <= HIGHEST or not math.isclose(given, confidence):
        wrong = asked[:100].decode("latin-1")
        raise refused(
            QUOTE_HEADER,
            f"must be the confidence of the quote, a number of hundredths from {LOWEST:g} to {HIGHEST:g}, not {wrong!r}",
        )
    return confidence


class Quotes(RouterWing):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        services.quoter = QuoteMaker(services.dispatcher)


WING = Quotes
