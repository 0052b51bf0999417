"""What an answer may carry that a client asks for in a header: by when its first token comes, and a receipt by which it can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.api.openai.generation_plan import GenerationPlan
from tandem.api.openai.reading import ReadChoice
from tandem.base.errors import InvalidRequest
from tandem.router.dispatch import Generation

if TYPE_CHECKING:
    from tandem.router.http.exchange import HttpExchange

QUOTE_HEADER = b"x-tandem-quote"
RECEIPT_HEADER = b"x-tandem-receipt"


def refused(header: bytes, why: str) -> InvalidRequest:
    return InvalidRequest(f"{header.decode()}: {why}", header.decode())


class FirstTokenQuoter:
    """Quotes nothing: a wing does."""

    def check(self, exchange: HttpExchange) -> None:
        """Called before anything is generated. Raises an InvalidRequest for a quote that cannot be given."""
        if exchange.header(QUOTE_HEADER) is not None:
            raise refused(QUOTE_HEADER, "this server does not say when a first token comes")

    def headers(self, exchange: HttpExchange, generation: Generation) -> list[tuple[bytes, bytes]]:
        """Called when the request was sent to its nodes. Returns the quote, if the request asks for one."""
        return []

    def ended(self, exchange: HttpExchange, generation: Generation) -> None:
        """Called when a request that was sent to its nodes has ended, so that it is known whether its quote was kept."""


class AnswerSigner:
    """Signs nothing: a wing does."""

    def check(self, exchange: HttpExchange, plan: GenerationPlan, *, streams: bool) -> None:
        """Called before anything is generated. Raises an InvalidRequest for a receipt that cannot be given."""
        if exchange.header(RECEIPT_HEADER) is not None:
            why = "this server signs no receipts, because its operator has not set router.receipt_key_file"
            raise refused(RECEIPT_HEADER, why)

    def headers(
        self, exchange: HttpExchange, plan: GenerationPlan, generation: Generation, read: Sequence[ReadChoice]
    ) -> list[tuple[bytes, bytes]]:
        """Returns the receipt of a whole answer, if the request asks for one."""
        return []
