"""Traces from the router that has them."""

from __future__ import annotations

import time
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from tandem.cluster.api_client import ApiClient
from tandem.router.tracing.record import TraceList, TraceRecord
from tandem.wire.errors import InternalError

# A prefill node tells when its transfer is confirmed, which can be a moment after the answer's end.
COMPLETE_WITHIN_S = 2.0
_ASK_AGAIN_S = 0.1

T = TypeVar("T")


class TraceClient:
    def __init__(self, url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self._api = ApiClient(url, key, transport)

    def close(self) -> None:
        self._api.close()

    def recent(self) -> TraceList:
        return self._get("/traces", TraceList)

    def find(self, name: str) -> TraceRecord:
        """Waits a moment for what is still to come of it."""
        deadline = time.monotonic() + COMPLETE_WITHIN_S
        while True:
            record = self._get(f"/traces/{quote(name, safe='')}", TraceRecord)
            complete = record.ended is not None and not record.missing
            if complete or time.monotonic() > deadline:
                return record
            time.sleep(_ASK_AGAIN_S)

    def _get(self, path: str, kind: type[T]) -> T:
        response = self._api.get(path)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise InternalError(
                f"{self._api.url}{path} does not look like a Tandem router's: {error}"
            ) from error
