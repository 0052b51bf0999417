"""JSON answers: small ones at once, others in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.types import Send

from tandem.router.openai.pieces import LoopTurn

# An answer that is larger is sent while it is made, without its length: chunked, as fast as the client reads.
WHOLE_BYTES = 256 << 10
_WRITE_BYTES = 64 << 10


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


async def send_pieces(
    send: Send, pieces: Iterator[bytes], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Others on the event loop have their turn while it is made. `send` waits for a client that is behind."""
    turn = LoopTurn()
    ready: list[bytes] = []
    size, begun = 0, False
    for piece in pieces:
        ready.append(piece)
        size += len(piece)
        if size > (_WRITE_BYTES if begun else WHOLE_BYTES):
            if not begun:
                begun = True
                start = [(b"content-type", b"application/json"), *headers]
                await send({"type": "http.response.start", "status": 200, "headers": start})
            await send({"type": "http.response.body", "body": b"".join(ready), "more_body": True})
            ready.clear()
            size = 0
        await turn.pass_on()
    if begun:
        await send({"type": "http.response.body", "body": b"".join(ready), "more_body": False})
    else:
        await send_bytes(send, b"".join(ready), b"application/json", headers=headers)
