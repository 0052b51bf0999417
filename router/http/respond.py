"""A JSON answer in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import Send


async def send_json(
    send: Send, body: Any, *, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    await send_bytes(send, msgspec.json.encode(body), b"application/json", status=status, headers=headers)


async def send_bytes(
    send: Send,
    body: bytes,
    content_type: bytes,
    *,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})
