"""GET /ui, the cluster's page, /ui/state, its data, small enough to be asked for every second, and
/ui/decisions, what the controller decided.

The page itself holds no figures. Its data needs an operator's key where keys are set, as /cluster does.
"""

from __future__ import annotations

import importlib.resources
from functools import cache
from typing import Any

import msgspec

from tandem.router.http.errors import Forbidden
from tandem.router.http.exchange import HttpExchange, send_json, send_page
from tandem.router.http.page_figures import node_rows, page_of_all
from tandem.router.http.services import Services

_NO_STORE = ((b"cache-control", b"no-store"),)


class DecidedView(msgspec.Struct, frozen=True):
    """What is read of the controller's view."""

    decisions: list[dict[str, Any]]


@cache
def _page() -> bytes:
    return importlib.resources.files(__package__).joinpath("ui.html").read_bytes()


async def page(services: Services, exchange: HttpExchange) -> None:
    await send_page(exchange.send, _page())


async def state(services: Services, exchange: HttpExchange) -> None:
    exchange.require_operator(services.keys)
    page = await page_of_all(services)
    shown = msgspec.structs.replace(page, nodes=node_rows(services))
    await send_json(exchange.send, shown, headers=_NO_STORE)


async def decisions(services: Services, exchange: HttpExchange) -> None:
    """What the controller decided, and why. Without keys only for users of the router's own machine."""
    exchange.require_operator(services.keys)
    if not services.tells_decisions or services.control is None:
        raise Forbidden(
            "the controller's decisions need an operator's key, or a router that listens on loopback alone"
        )
    view = msgspec.json.decode(await services.control.act("view", b"{}"), type=DecidedView)
    answer = {"decisions": view.decisions, "may_act": services.keys.required}
    await send_json(exchange.send, answer, headers=_NO_STORE)
