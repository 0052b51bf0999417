"""What an answer carries so that it can be made again, as the rest of the router knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.api.openai.generation_plan import GenerationPlan
from tandem.api.openai.reading import ReadChoice
from tandem.base.errors import InvalidRequest
from tandem.router.dispatch import Generation

if TYPE_CHECKING:
    from tandem.router.http.exchange import HttpExchange

RECEIPT_HEADER = b"x-tandem-receipt"


class AnswerSigner:
    """Signs nothing: a wing does."""

    def check(self, exchange: HttpExchange, plan: GenerationPlan, *, streams: bool) -> None:
        """Called before anything is generated. Raises an InvalidRequest for a receipt that cannot be given."""
        if exchange.header(RECEIPT_HEADER) is not None:
            raise refused("this server signs no receipts, because its operator has not set router.receipt_key_file")

    def headers(
        self, exchange: HttpExchange, plan: GenerationPlan, generation: Generation, read: Sequence[ReadChoice]
    ) -> list[tuple[bytes, bytes]]:
        """Returns the receipt of a whole answer, if the request asks for one."""
        return []


def refused(why: str) -> InvalidRequest:
    name = RECEIPT_HEADER.decode()
    return InvalidRequest(f"{name}: {why}", name)
