"""Which router a request goes to. Any router serves any request, and chooses its nodes itself, so this only spreads requests, and keeps
those together that need what one router has."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection

# What is made at these paths stays at the router where it was made.
_KEPT = ("/v1/files", "/v1/uploads", "/v1/batches", "/v1/messages/batches", "/v1/responses")


class RouterChoice:
    def __init__(self) -> None:
        self.running: Counter[str] = Counter()  # requests by router
        self._last: dict[str, int] = {}  # when each router was last chosen
        self._chosen = 0

    def pick(self, routers: Collection[str], path: str, owner: bytes) -> str | None:
        """`owner`: the client's key. Returns None if there is no router."""
        if is_kept(path):
            return max(routers, key=lambda router: _rank(router, owner), default=None)
        return min(routers, key=lambda router: (self.running[router], self._last.get(router, 0), router), default=None)

    def begin(self, router: str) -> None:
        self._chosen += 1
        self._last[router] = self._chosen
        self.running[router] += 1

    def end(self, router: str) -> None:
        self.running[router] -= 1
        if not self.running[router]:
            del self.running[router]

    def forget(self, routers: Collection[str]) -> None:
        for router in routers:
            self._last.pop(router, None)


def is_kept(path: str) -> bool:
    bare = path.partition("?")[0]
    return any(bare == kept or bare.startswith(f"{kept}/") for kept in _KEPT)


def _rank(router: str, owner: bytes) -> bytes:
    """The highest of these has the owner's requests: when a router comes or leaves, only those that are or were its own move."""
    return hashlib.blake2b(b"\0".join((router.encode(), owner)), digest_size=8).digest()
