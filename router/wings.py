"""Wings of the router: what a deployment may never use. The core imports none of them. It reads ROWS when a router starts, and never
while it serves a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from tandem.base.wings import find_wings
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.services import Services

ROWS = ("tandem.router.realtime.wing",)

Handler = Callable[[Services, HttpExchange], Awaitable[None]]
RouteRow = tuple[str, Handler, list[str]]  # a path, its handler, and its methods


class RouterWing:
    """What one wing adds to one router, whose state it has. A module of ROWS has its own as `WING`."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def routes(self) -> list[RouteRow]:
        return []


def open_wings(services: Services) -> list[RouterWing]:
    return [cast("type[RouterWing]", module.WING)(services) for module in find_wings(ROWS)]
