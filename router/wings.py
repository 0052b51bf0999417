"""Wings of the router: what a deployment may never use. The core imports none of them. It reads ROWS when a router starts, and never
while it serves a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar, cast

from tandem.base.errors import TandemError
from tandem.base.wings import find_wings
from tandem.router.http.exchange import ErrorForm, HttpExchange
from tandem.router.http.operation import ApiOperation
from tandem.router.http.services import Services

ROWS = (
    "tandem.router.processes.wing",  # first: others ask the siblings that it knows
    "tandem.router.vectors.wing",
    "tandem.router.responses.wing",
    "tandem.router.messages.wing",
    "tandem.router.realtime.wing",
    "tandem.router.batches.wing",
    "tandem.router.other_models.wing",
    "tandem.router.tracing.wing",
    "tandem.router.receipts.wing",
    "tandem.router.quotes.wing",
)

Handler = Callable[[Services, HttpExchange], Awaitable[None]]
RouteRow = tuple[str, Handler, list[str]]  # a path, its handler, and its methods


class RouterWing:
    """What one wing adds to one router, whose state it has. A module of ROWS has its own as `WING`."""

    operations: ClassVar[tuple[ApiOperation, ...]] = ()  # its part of the API document
    # How it writes errors, at its paths with this beginning.
    error_form: ClassVar[tuple[str, ErrorForm] | None] = None

    def __init__(self, services: Services) -> None:
        self.services = services

    def routes(self) -> list[RouteRow]:
        return []

    async def answer_instead(self, exchange: HttpExchange, error: TandemError) -> bool:
        """May answer in place of an error. Returns whether it did."""
        return False

    async def start(self) -> None:
        """Called before the router accepts."""

    async def ending(self) -> None:
        """Called when the router begins to end. What the wing does by itself ends; its requests go on."""

    async def leave(self) -> None:
        """Called when the router's requests have ended, before it does."""

    async def close(self) -> None: ...


def wing_types() -> list[type[RouterWing]]:
    return [cast("type[RouterWing]", module.WING) for module in find_wings(ROWS)]
