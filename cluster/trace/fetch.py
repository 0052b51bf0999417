"""Traces from the router that has them."""

from __future__ import annotations

import time
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from router.tracing.record import TraceList, TraceRecord
from wire.errors import InternalError, RequestError, Unavailable

# A prefill node tells when its transfer is confirmed, which can be a moment after the answer's end.
COMPLETE_WITHIN_S = 2.0
_ASK_AGAIN_S = 0.1

T = TypeVar("T")


class TraceClient:
    def __init__(self, url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(transport=transport, timeout=5.0, trust_env=False, headers=headers)

    def close(self) -> None:
        self._http.close()

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
        try:
            response = self._http.get(f"{self._url}{path}")
        except httpx.HTTPError as error:
            raise Unavailable(
                f"{self._url} does not answer ({error}): is `tandem serve` running there? Name another with --url"
            ) from error
        if response.is_error:
            raise RequestError(_message(response))
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise InternalError(f"{self._url}{path} does not look like a Tandem router's: {error}") from error


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{response.url} answered {response.status_code}: {response.text[:300]}"
