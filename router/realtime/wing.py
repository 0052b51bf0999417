"""The route of /v1/realtime, and who may connect to it."""

from __future__ import annotations

from tandem.http_server.turns import Turns
from tandem.http_server.websocket import WebSocket
from tandem.router.http.errors import Forbidden
from tandem.router.http.exchange import HttpExchange, Query
from tandem.router.http.generate_routes import enter
from tandem.router.http.services import Services
from tandem.router.realtime.session import RealtimeSession
from tandem.router.wings import RouteRow, RouterWing

# What a session takes besides its text: its tasks, its socket's buffers and frames.
SESSION_BYTES = 64 << 10


class Realtime(RouterWing):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._turns = Turns()  # for all sessions to read

    def routes(self) -> list[RouteRow]:
        return [("/v1/realtime", self._connect, ["GET"])]

    async def _connect(self, services: Services, exchange: HttpExchange) -> None:
        _check_origin(services, exchange)
        name = Query(exchange).text("model")
        services.model.check_name(name)
        timeouts, limits = services.config.timeouts, services.config.limits
        # A session is a request of its key from its beginning to its end.
        with enter(services, exchange) as reservation, services.kept.share(SESSION_BYTES, exchange.owner) as share:
            socket = WebSocket(
                exchange,
                share,
                most_bytes=limits.body_bytes,
                ping_s=timeouts.realtime_ping,
                idle_s=timeouts.realtime_idle,
                turns=self._turns,
            )
            session = RealtimeSession(services, exchange, socket, share, name)
            await socket.accept(session.event("session.created", session=session.shown()))
            try:
                await session.run()
            finally:
                reservation.settle(0, [])


def _check_origin(services: Services, exchange: HttpExchange) -> None:
    """Refuses pages of other sites. Browsers let any page open a WebSocket to any site, so CORS does not
    protect this path."""
    if exchange.is_from_elsewhere(services.config.cors_origins):
        raise Forbidden("origin: pages of other sites may not connect; router.cors_origins names those that may")


WING = Realtime
