"""Cluster members for tests: endpoints with this process's key, and sockets that send any bytes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import zmq

from tandem.wire import sockets
from tandem.wire.endpoints import Endpoint, parse_endpoint
from tandem.wire.sockets import LoopInbox, public_key


def endpoint_at(port: int, host: str = "127.0.0.1") -> str:
    return str(Endpoint(public_key(), host, port))


def address_of(endpoint: str) -> tuple[str, int]:
    parsed = parse_endpoint(endpoint)
    assert parsed is not None
    return parsed.host, parsed.port


@contextlib.contextmanager
def on_a_loop(kind: Any, handle: Callable[[Any], None]) -> Iterator[LoopInbox[Any]]:
    """An inbox on an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(5)

    async def make() -> LoopInbox[Any]:
        inbox = LoopInbox[Any]("127.0.0.1", kind, handle, name="test")
        inbox.listen()
        return inbox

    async def close() -> None:
        made.close()

    made = run(make())
    try:
        yield made
    finally:
        run(close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def connect_as_member(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.connect(sockets.shared.keys.protect_caller(socket, endpoint))
