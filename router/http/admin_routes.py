"""POST /admin/...: what an operator does to the cluster. The router is only the door: what an action means, the cluster knows."""

from __future__ import annotations

from tandem.router.http.body import read_bytes
from tandem.router.http.errors import Forbidden
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.respond import send_bytes
from tandem.router.http.services import Services
from tandem.wire.errors import Unavailable


async def admin(services: Services, exchange: HttpExchange) -> None:
    """For operators' keys alone, also where no key is set: then there is none, and the cluster is changed from its own machines."""
    if not services.keys.required:
        raise Forbidden(
            "/admin needs an operator's key, and this router has no keys: set one in router.api_keys"
        )
    exchange.require_operator(services.keys)
    if services.control is None:
        raise Unavailable("this router belongs to no cluster that could be changed")
    with services.bodies.share() as share:
        body = bytes(await read_bytes(exchange, services.config, share))
    action = exchange.scope["path_params"]["action"]
    exchange.notes += f" action={action[:40]!r}"
    await send_bytes(exchange.send, await services.control.act(action, body), b"application/json")
