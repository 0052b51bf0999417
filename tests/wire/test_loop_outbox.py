from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tandem.wire import loop_outbox
from tandem.wire.errors import NodeLost
from tandem.wire.loop_outbox import LoopOutbox
from tandem.wire.requests import Cancel, Ping, ToNode
from tandem.wire.sockets import Inbox
from tandem.wire.zmtp import PULL_OPENING


class Heard:
    """An inbox as nodes have it, on ZMQ's own socket, and what came in."""

    def __init__(self, port: int = 0) -> None:
        self.messages: list[Any] = []
        self._changed = threading.Condition()
        self.inbox: Inbox[Any] = Inbox("127.0.0.1", ToNode, self._on_message, name="test", port=port)
        self.endpoint = self.inbox.endpoint
        self.port = int(self.endpoint.rpartition(":")[2])

    def _on_message(self, message: Any) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    async def wait(self, count: int) -> list[Any]:
        def waited() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: len(self.messages) >= count, 10)

        assert await asyncio.to_thread(waited), self.messages
        return self.messages


def run(work: Callable[[LoopOutbox], Awaitable[None]]) -> None:
    async def main() -> None:
        outbox = LoopOutbox()
        try:
            async with asyncio.timeout(20):
                await work(outbox)
        finally:
            await outbox.close()

    asyncio.run(main())


def test_messages_of_every_size_arrive_in_order() -> None:
    async def work(outbox: LoopOutbox) -> None:
        heard = Heard()
        sent = [Cancel("x", ["i" * size]) for size in (0, 1, 230, 231, 232, 300, 70_000, 3_000_000, 1)] * 3
        for message in sent:
            outbox.send(heard.endpoint, message)
        assert await heard.wait(len(sent)) == sent
        assert heard.inbox.malformed == 0
        heard.inbox.close()

    run(work)


def test_messages_wait_for_a_reader_and_find_its_successor() -> None:
    async def work(outbox: LoopOutbox) -> None:
        first = Heard()
        port = first.port
        first.inbox.close()
        outbox.send(first.endpoint, Ping("early"))
        second = Heard(port)
        assert await second.wait(1) == [Ping("early")]
        connection = outbox._connections[first.endpoint]
        second.inbox.close()
        await connection._lost.wait()
        outbox.send(first.endpoint, Ping("again"))
        third = Heard(port)
        assert await third.wait(1) == [Ping("again")]
        third.inbox.close()

    run(work)


def test_a_queue_that_nobody_reads_is_full_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_outbox, "SEND_QUEUE_FRAMES", 3)

    async def work(outbox: LoopOutbox) -> None:
        heard = Heard()
        heard.inbox.close()
        for _ in range(3):
            outbox.send(heard.endpoint, Ping("x"))
        with pytest.raises(NodeLost, match="has not read 3 messages"):
            outbox.send(heard.endpoint, Ping("x"))

    run(work)


def test_a_reader_that_stops_fills_the_queue_and_gets_all_of_it_in_order_when_it_goes_on() -> None:
    async def work(outbox: LoopOutbox) -> None:
        connected, reading, complete = asyncio.Event(), asyncio.Event(), asyncio.Event()
        received = bytearray()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(PULL_OPENING)
            connected.set()
            await reading.wait()
            while len(received) < 40 * 300_000:
                received.extend(await reader.read(1 << 20))
            complete.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 16)
        port = server.sockets[0].getsockname()[1]
        endpoint = f"tcp://127.0.0.1:{port}"
        for index in range(40):
            outbox.send(endpoint, Cancel(f"number {index}:", ["x" * 300_000]))
        connection = outbox._connections[endpoint]
        await connected.wait()
        while not connection._reader.ready:  # noqa: ASYNC110 (what the reader has seen has no event)
            await asyncio.sleep(0)
        assert not connection._takes
        assert connection._queue
        reading.set()
        await complete.wait()
        places = [received.index(f"number {index}:".encode()) for index in range(40)]
        assert places == sorted(places)
        server.close()

    run(work)


def test_what_is_forgotten_is_not_sent() -> None:
    async def work(outbox: LoopOutbox) -> None:
        gone = Heard()
        gone.inbox.close()
        outbox.send(gone.endpoint, Ping("for the predecessor"))
        outbox.forget(gone.endpoint)
        outbox.forget(gone.endpoint)
        successor = Heard(gone.port)
        outbox.send(gone.endpoint, Ping("for the successor"))
        assert await successor.wait(1) == [Ping("for the successor")]
        successor.inbox.close()

    run(work)


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://host", "tcp://host:port", "ipc:///tmp/x", "inproc://x"]
)
def test_an_address_that_is_none(endpoint: str) -> None:
    async def work(outbox: LoopOutbox) -> None:
        with pytest.raises(NodeLost, match="cannot connect"):
            outbox.send(endpoint, Ping("x"))

    run(work)


def test_a_host_that_is_not_there_and_a_peer_that_is_no_inbox_are_tried_again() -> None:
    async def work(outbox: LoopOutbox) -> None:
        tries = asyncio.Semaphore(0)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tries.release()
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        outbox.send(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", Ping("x"))
        outbox.send("tcp://no-such-host.invalid:1", Ping("x"))
        await tries.acquire()
        await tries.acquire()
        server.close()

    run(work)


def test_what_was_sent_just_before_the_end_leaves_and_nothing_after_it() -> None:
    async def work(outbox: LoopOutbox) -> None:
        heard = Heard()
        outbox.send(heard.endpoint, Ping("first"))
        await heard.wait(1)
        outbox.send(heard.endpoint, Ping("last"))
        await outbox.close()
        await outbox.close()
        outbox.send(heard.endpoint, Ping("late"))
        assert await heard.wait(2) == [Ping("first"), Ping("last")]
        heard.inbox.close()

    run(work)
