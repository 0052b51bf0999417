"""Passes requests for other deployments' models on to their routers, and passes the answers back, both
unchanged.

The other router does all the work: it checks the key, counts quotas and tokenizes. This one reads the body
only to see which model is asked for, and passes bytes on in both directions as they arrive. When the client
disconnects, the other router sees a disconnect, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import httpcore
import httpx

from tandem.api.openai.served_model import ModelElsewhere, NotHere
from tandem.base.errors import DeadlineExceeded, TandemError, Unavailable, UnknownModel
from tandem.router.config import RouterConfig
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.services import Services
from tandem.router.wings import RouterWing

# Headers that are not passed on: those of one connection, those that the client library sets, and those
# checked here.
_OWN = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    b"content-length x-request-id expect origin".split()
)
# set by the first router, so that two routers never pass a request back and forth
_MARK = b"x-tandem-passed-on"
_CONNECT_S = 5.0
_NOT_THERE = (401, 403, 404)  # a router that does not know the client's key has nothing of that client
_PIECE_BYTES = 1 << 16
_UPGRADE = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
# Sent on a WebSocket when this router stops, once nothing has arrived for a while, so that it falls between
# two messages.
_GOING_AWAY = b"\x88\x02\x03\xe9"
_QUIET_S = 1.0


class OtherModels:
    """The routers of other deployments. Runs on the event loop only."""

    def __init__(self, config: RouterConfig) -> None:
        self._urls: Mapping[str, str] = config.other_models
        self._timeouts = config.timeouts
        self._connections = config.limits.connections
        self._http: httpx.AsyncClient | None = None

    async def pass_on(self, exchange: HttpExchange, there: ModelElsewhere) -> None:
        """Passes a request on. Raises Unavailable when the other router does not answer or breaks off its
        answer."""
        if self._was_passed_on(exchange):
            raise UnknownModel(
                f"the model {there.model[:200]!r} is not here: two routers name each other for it (router.other_models)"
            )
        url = self._urls[there.model]
        exchange.notes += f" passed_on={url}"

        async def work() -> None:
            async with self._asked(exchange, url) as answer:
                await _relay(exchange, answer)

        if (b"upgrade", b"websocket") in [(name, value.lower()) for name, value in exchange.headers]:
            with _unavailable(f"the router of the model {there.model[:200]!r}"):
                await self._converse(exchange, url)
        else:
            await self._in_time(exchange, work, f"the router of the model {there.model[:200]!r}")

    async def find(self, exchange: HttpExchange, missing: NotHere) -> None:
        """Finds what the path names by its id: asks the other routers in turn, and passes on the answer of the one
        that has it. Raises `missing` when none has it."""
        if not self._urls or self._was_passed_on(exchange):
            raise missing
        names = {url.rstrip("/"): name for name, url in self._urls.items()}
        silent: list[str] = []

        async def work() -> None:
            for url, name in names.items():
                try:
                    async with self._asked(exchange, url) as answer:
                        if answer.status_code not in _NOT_THERE:
                            exchange.notes += f" passed_on={url}"
                            await _relay(exchange, answer)
                            return
                except httpx.HTTPError:
                    if exchange.status is not None:
                        raise
                    silent.append(name)
            if silent:
                raise Unavailable(f"{missing}; the routers of these models do not answer: {', '.join(silent)}")
            raise missing

        await self._in_time(exchange, work, "the router that has the response")

    def _was_passed_on(self, exchange: HttpExchange) -> bool:
        return any(name == _MARK for name, _ in exchange.headers)

    async def _in_time(self, exchange: HttpExchange, work: Callable[[], Awaitable[None]], who: str) -> None:
        async def timed() -> None:
            try:
                async with asyncio.timeout(self._timeouts.total):
                    await work()
            except TimeoutError:
                raise DeadlineExceeded("the request took longer than router.timeouts.total allows") from None

        with _unavailable(who):
            await exchange.until_disconnect(timed)

    def _asked(
        self, exchange: HttpExchange, url: str, more: list[tuple[bytes, bytes]] | None = None
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        scope = exchange.scope
        headers = [(name, value) for name, value in exchange.headers if name not in _OWN] + (more or [])
        headers += [(b"x-request-id", exchange.request_id.encode()), (_MARK, b"1")]
        query: bytes = scope.get("query_string") or b""
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        target = f"{url.rstrip('/')}{path}{'?' + query.decode('latin-1') if query else ''}"
        return self._client().stream(scope["method"], target, headers=headers, content=bytes(exchange.body) or None)

    async def _converse(self, exchange: HttpExchange, url: str) -> None:
        """Passes on a WebSocket. The other router keeps the deadlines: its pings reach the client through
        this one."""
        async with self._asked(exchange, url, _UPGRADE) as answer:
            if answer.status_code != 101:
                await _relay(exchange, answer)
                return
            there: httpcore.AsyncNetworkStream = answer.extensions["network_stream"]
            kept = [(name, value) for name, value in answer.headers.raw if name.lower() not in _OWN]
            await exchange.send({"type": "http.response.start", "status": 101, "headers": [*kept, *_UPGRADE]})
            await _write(exchange, b"")
            came = asyncio.Event()

            async def forth() -> None:
                while (message := await exchange.receive())["type"] != "http.disconnect":
                    if message["body"]:
                        await there.write(message["body"], timeout=self._timeouts.slow_reader)
                    if not message["more_body"]:  # this router stops, after letting a running answer end
                        with contextlib.suppress(TimeoutError):
                            while True:
                                came.clear()
                                async with asyncio.timeout(_QUIET_S):
                                    await came.wait()
                        await _write(exchange, _GOING_AWAY)
                        return

            async def back() -> None:
                while data := await there.read(_PIECE_BYTES):
                    came.set()
                    await _write(exchange, data)

            ways = [asyncio.create_task(way(), name=f"passed-on-{way.__name__}") for way in (forth, back)]
            try:
                done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in done:
                    way.result()
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.wait(ways)
                await _write(exchange, b"", more=False)

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            ping_s = max(1, round(self._timeouts.realtime_ping))
            # The kernel's keepalive finds machines that were cut off.
            options: list[Any] = [
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ping_s),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, ping_s // 4)),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
                (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * ping_s),
            ]
            limits = httpx.Limits(max_connections=self._connections)
            self._http = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(limits=limits, trust_env=False, socket_options=options),
                timeout=httpx.Timeout(self._timeouts.total, connect=_CONNECT_S),
                trust_env=False,
                follow_redirects=False,
            )
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()


@contextlib.contextmanager
def _unavailable(who: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpcore.NetworkError, httpcore.TimeoutException) as error:
        raise Unavailable(f"{who} does not answer ({type(error).__name__})") from error


async def _relay(exchange: HttpExchange, answer: httpx.Response) -> None:
    kept = [(name, value) for name, value in answer.headers.raw if name.lower() not in _OWN]
    if (length := answer.headers.get("content-length")) is not None:
        kept.append((b"content-length", length.encode()))
    exchange.is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    await exchange.send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
    if exchange.is_stream:
        await _write(exchange, b"")  # its head may come long before its first event
    async for some in answer.aiter_raw():
        await _write(exchange, some)
    await _write(exchange, b"", more=False)


async def _write(exchange: HttpExchange, data: bytes, *, more: bool = True) -> None:
    await exchange.send({"type": "http.response.body", "body": data, "more_body": more})


class OtherDeployments(RouterWing):
    """Answers from other deployments, in place of an error here."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._others = OtherModels(services.config)

    async def answer_instead(self, exchange: HttpExchange, error: TandemError) -> bool:
        if isinstance(error, ModelElsewhere):
            with self.services.kept.share(len(exchange.body), exchange.owner):
                await self._others.pass_on(exchange, error)
        elif isinstance(error, NotHere) and "{" in exchange.route:
            await self._others.find(exchange, error)
        else:
            return False
        return True

    async def close(self) -> None:
        await self._others.close()


WING = OtherDeployments
