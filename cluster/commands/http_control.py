"""A running cluster through one of its routers, for commands with `--url`. Implements `cluster.orders.OperatedCluster`."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import httpx
import msgspec

from tandem.base.errors import InternalError
from tandem.cluster.api_client import ANSWER_S, ApiClient
from tandem.cluster.orders import Order

# How long a router waits for the controller's answer, and then some.
_DECIDE_S = 45.0

T = TypeVar("T")


class HttpControl:
    def __init__(self, url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self._api = ApiClient(url, key, transport)

    def close(self) -> None:
        self._api.close()

    async def ask(self, order: Order[T]) -> T:
        path, timeout = f"/admin/{order.action}", httpx.Timeout(ANSWER_S, read=order.limit_s + _DECIDE_S)
        answer = await asyncio.to_thread(self._api.post, path, order.body(), timeout)
        try:
            return order.decoded(answer.content)
        except msgspec.DecodeError as error:
            raise InternalError(
                f"{self._api.url}{path} did not answer like a Tandem router: {error}"
            ) from error
