"""The routers that a list of names leads to, and which of them take requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import httpx

from tandem.base.errors import ConfigurationError
from tandem.wire.endpoints import address_of

logger = logging.getLogger(__name__)

LOOK_S = 1.0
ANSWER_S = 2.0  # a router whose machine is busy may take this long
MOST_SILENT = 2  # a router that did not answer so many times in a row takes no requests


@dataclass(frozen=True)
class RouterName:
    """Where to find routers: each address of the host is one, as those of a headless Service are."""

    host: str
    port: int
    is_tls: bool = False

    @classmethod
    def parse(cls, text: str) -> RouterName:
        try:
            url = httpx.URL(text if "://" in text else f"http://{text}")
            port = url.port
        except httpx.InvalidURL:
            url, port = httpx.URL(), None
        if url.scheme not in ("http", "https") or not url.host or port is None or url.path not in ("", "/"):
            raise ConfigurationError(
                f"--routers: {text[:100]!r} is no router's address: write HOST:PORT, or https://HOST:PORT if it speaks TLS"
            )
        return cls(url.host, port, url.scheme == "https")


@dataclass
class _Router:
    name: RouterName
    is_ready: bool = False
    silent: int = 0  # how many times in a row it did not answer
    said: str = ""  # why it takes no requests


class KnownRouters:
    """`look()` is called once each LOOK_S. `on_gone`: told which routers are known no longer."""

    def __init__(
        self,
        names: Iterable[RouterName],
        http: httpx.AsyncClient,
        on_gone: Callable[[Collection[str]], None] = lambda gone: None,
    ) -> None:
        self._names = tuple(names)
        self._http = http
        self._on_gone = on_gone
        self._found: dict[str, _Router] = {}  # by address, as `IP:PORT`
        self.has_looked = False

    @property
    def ready(self) -> list[str]:
        return [address for address, router in self._found.items() if router.is_ready]

    @property
    def why_none(self) -> str:
        said = sorted({f"{address}: {router.said}" for address, router in self._found.items() if not router.is_ready})
        return "; ".join(said[:5]) or "no router's name leads to an address"

    async def look(self) -> None:
        found = await asyncio.gather(*map(self._addresses, self._names))
        there = dict(itertools.chain.from_iterable(found))
        if gone := [address for address in self._found if address not in there]:
            for address in gone:
                del self._found[address]
            self._on_gone(gone)
        for address, name in there.items():
            self._found.setdefault(address, _Router(name))
        await asyncio.gather(*(self._ask(address, router) for address, router in self._found.items()))
        self.has_looked = True

    async def _addresses(self, name: RouterName) -> list[tuple[str, RouterName]]:
        """Those from before if the name cannot be looked up now: the routers may be well."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # also that it takes too long, and names that cannot be one
            logger.warning("%s cannot be looked up: %s", name.host, str(error) or f"no answer within {ANSWER_S:.0f} s")
            return [(address, router.name) for address, router in self._found.items() if router.name == name]
        return [(address_of(ip, name.port), name) for ip in dict.fromkeys(str(each[4][0]) for each in found)]

    async def _ask(self, address: str, router: _Router) -> None:
        was_ready = router.is_ready
        name = router.name
        scheme = "https" if name.is_tls else "http"
        try:
            async with asyncio.timeout(ANSWER_S):  # in all: httpx waits that long for each piece
                answer = await self._http.get(
                    f"{scheme}://{address}/health",
                    headers={"host": f"{name.host}:{name.port}"},
                    extensions={"sni_hostname": name.host} if name.is_tls else {},
                )
        except (httpx.TimeoutException, TimeoutError):
            router.silent += 1
            router.is_ready = router.is_ready and router.silent < MOST_SILENT
            router.said = f"no answer within {ANSWER_S:.0f} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            router.silent, router.is_ready, router.said = 0, False, str(error) or type(error).__name__
        else:
            router.silent, router.is_ready = 0, answer.status_code == 200
            router.said = "" if router.is_ready else f"{answer.status_code} {answer.text[:200]}"
        if router.is_ready != was_ready:
            said = "takes requests" if router.is_ready else f"takes no requests: {router.said}"
            logger.log(logging.INFO if router.is_ready else logging.ERROR, "router %s %s", address, said)
