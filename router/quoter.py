"""By when a request's first token comes, as the rest of the router is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.base.errors import InvalidRequest
from tandem.router.dispatch import Generation

if TYPE_CHECKING:
    from tandem.router.http.exchange import HttpExchange

QUOTE_HEADER = b"x-tandem-quote"


class FirstTokenQuoter:
    """Quotes nothing: a wing does."""

    def check(self, exchange: HttpExchange) -> None:
        """Called before anything is generated. Raises an InvalidRequest for a quote that cannot be given."""
        if exchange.header(QUOTE_HEADER) is not None:
            raise refused("this server does not say when a first token comes")

    def headers(self, exchange: HttpExchange, generation: Generation) -> list[tuple[bytes, bytes]]:
        """Called when the request was sent to its nodes. Returns the quote, if the request asks for one."""
        return []

    def ended(self, exchange: HttpExchange, generation: Generation) -> None:
        """Called when a request that was sent to its nodes has ended, so that it is known whether its quote was kept."""


def refused(why: str) -> InvalidRequest:
    name = QUOTE_HEADER.decode()
    return InvalidRequest(f"{name}: {why}", name)
