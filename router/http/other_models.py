"""Requests for models that other deployments serve: passed on to their routers as they came, and answered as those answer.

The other router does all that a router does: it checks the key, counts quotas, tokenizes. This one reads the body to see whose the request is,
and passes bytes on in both directions as fast as they come. A client that goes away is gone for the other router, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

from tandem.router.config import RouterConfig
from tandem.router.http.exchange import HttpExchange
from tandem.router.openai.served_model import ModelElsewhere
from tandem.wire.errors import DeadlineExceeded, Unavailable, UnknownModel

# Of one connection, not of what goes over it; and what its client makes itself.
_OWN = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    b"content-length x-request-id expect".split()
)
_MARK = b"x-tandem-passed-on"  # by a router that was not asked by another one
_CONNECT_S = 5.0


class OtherModels:
    """On the event loop only."""

    def __init__(self, config: RouterConfig) -> None:
        self._urls: Mapping[str, str] = config.other_models
        self._total_s = config.timeouts.total
        self._connections = config.limits.connections
        self._http: httpx.AsyncClient | None = None

    async def pass_on(self, exchange: HttpExchange, there: ModelElsewhere) -> None:
        """Raises Unavailable when the other router does not answer, or ends in the middle of its answer."""
        if any(name == _MARK for name, _ in exchange.headers):
            raise UnknownModel(
                f"the model {there.model[:200]!r} is not here: two routers name each other for it (router.other_models)"
            )
        url = self._urls[there.model]
        exchange.notes += f" passed_on={url}"

        async def work() -> None:
            try:
                async with asyncio.timeout(self._total_s):
                    await self._through(exchange, url)
            except TimeoutError:
                raise DeadlineExceeded("the request took longer than timeouts.total allows") from None
            except httpx.HTTPError as error:
                raise Unavailable(
                    f"the router of the model {there.model[:200]!r} does not answer ({type(error).__name__})"
                ) from error

        await exchange.until_disconnect(work)

    async def _through(self, exchange: HttpExchange, url: str) -> None:
        scope = exchange.scope
        headers = [(name, value) for name, value in exchange.headers if name not in _OWN]
        headers += [(b"x-request-id", exchange.request_id.encode()), (_MARK, b"1")]
        query: bytes = scope.get("query_string") or b""
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        target = f"{url.rstrip('/')}{path}{'?' + query.decode('latin-1') if query else ''}"
        async with self._client().stream(
            scope["method"], target, headers=headers, content=bytes(exchange.body) or None
        ) as answer:
            kept = [(name, value) for name, value in answer.headers.raw if name.lower() not in _OWN]
            if (length := answer.headers.get("content-length")) is not None:
                kept.append((b"content-length", length.encode()))
            exchange.is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
            await exchange.send(
                {"type": "http.response.start", "status": answer.status_code, "headers": kept}
            )
            async for some in answer.aiter_raw():
                await exchange.send({"type": "http.response.body", "body": some, "more_body": True})
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = httpx.AsyncClient(
                timeout=httpx.Timeout(self._total_s, connect=_CONNECT_S),
                limits=httpx.Limits(max_connections=self._connections),
                trust_env=False,
                follow_redirects=False,
            )
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
