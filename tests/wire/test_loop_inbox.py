from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.wire.requests import Cancel, Ping, ToNode
from tandem.wire.sockets import MAX_FRAME_BYTES, MESSAGES_PER_TURN, LoopInbox, Outbox
from tests.wire.members import address_of


class Listener:
    """An inbox on the running loop, and what came in."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.changed = asyncio.Event()
        self.threads: set[int] = set()
        self.inbox: LoopInbox[Any] = LoopInbox("127.0.0.1", ToNode, lambda each: self.on_message(each), name="test")
        self.outbox = Outbox()

    def on_message(self, message: Any) -> None:
        self.threads.add(threading.get_ident())
        self.messages.append(message)
        self.changed.set()

    async def wait(self, count: int) -> None:
        while len(self.messages) < count:
            self.changed.clear()
            await self.changed.wait()


def run(work: Callable[[Listener], Awaitable[None]]) -> None:
    async def main() -> None:
        listener = Listener()
        listener.inbox.listen()
        try:
            async with asyncio.timeout(10):
                await work(listener)
        finally:
            listener.inbox.close()
            listener.outbox.close()

    asyncio.run(main())


def test_messages_arrive_in_order_on_the_loop_itself() -> None:
    async def work(listener: Listener) -> None:
        count = 3 * MESSAGES_PER_TURN + 7
        for index in range(count):
            listener.outbox.send(listener.inbox.endpoint, Cancel("x", [str(index)]))
        await listener.wait(count)
        assert [message.request_ids for message in listener.messages] == [[str(i)] for i in range(count)]
        assert listener.threads == {threading.get_ident()}

    run(work)


def test_messages_that_take_long_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five that are there together: what became ready while the first was handled comes before the last."""
    monkeypatch.setattr("tandem.wire.sockets.TURN_S", 0.0)
    order: list[str] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def on_message(ping: Ping) -> None:
            order.append(ping.reply_to)
            if ping.reply_to == "0":
                loop.call_soon(order.append, "other")
            elif ping.reply_to == "4":
                done.set()

        inbox: LoopInbox[Any] = LoopInbox("127.0.0.1", ToNode, on_message, name="test")
        outbox = Outbox()
        for index in range(5):
            outbox.send(inbox.endpoint, Ping(str(index)))
        # Until the first has arrived the loop stands still, and the others follow at once.
        assert inbox._socket.poll(10_000)
        inbox.listen()
        async with asyncio.timeout(10):
            await done.wait()
        outbox.close()
        inbox.close()

    asyncio.run(scenario())
    assert [name for name in order if name != "other"] == ["0", "1", "2", "3", "4"]
    assert order.index("other") < order.index("4")


def test_bursts_with_pauses_between_are_all_noticed() -> None:
    async def work(listener: Listener) -> None:
        expected = 0
        for burst in [1, 2, 1, 40, 1, MESSAGES_PER_TURN, MESSAGES_PER_TURN + 1, 1]:
            for _ in range(burst):
                await asyncio.to_thread(listener.outbox.send, listener.inbox.endpoint, Ping("x"))
            expected += burst
            await listener.wait(expected)
            assert len(listener.messages) == expected

    run(work)


def test_others_on_the_loop_have_their_turn_under_a_flood() -> None:
    async def work(listener: Listener) -> None:
        total = 20 * MESSAGES_PER_TURN
        for _ in range(total):
            listener.outbox.send(listener.inbox.endpoint, Ping("x"))
        turns = 0
        while len(listener.messages) < total:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 20

    run(work)


# What a PUSH socket says first, in ZMTP 3.0: its greeting, and that it is a PUSH socket.
_OPENING = (b"\xff" + bytes(8) + b"\x7f\x03\x00NULL").ljust(64, b"\0") + (
    b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 1000,
        _OPENING + b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
        _OPENING[:64] + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB",
    ],
    ids=["http", "noise", "a frame too large", "another kind of socket"],
)
def test_a_peer_that_breaks_the_protocol_does_not_disturb_the_others(said: bytes) -> None:
    async def work(listener: Listener) -> None:
        host, port = address_of(listener.inbox.endpoint)
        _, writer = await asyncio.open_connection(host, port)
        writer.write(said)
        await writer.drain()
        listener.outbox.send(listener.inbox.endpoint, Ping("after"))
        await listener.wait(1)
        assert listener.messages == [Ping("after")]
        writer.close()

    run(work)


def test_a_peer_that_never_greets_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.wire.curve.HANDSHAKE_S", 0.01)

    async def work(listener: Listener) -> None:
        host, port = address_of(listener.inbox.endpoint)
        reader, writer = await asyncio.open_connection(host, port)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):  # its own greeting; then the end
                pass
        writer.close()

    run(work)


def test_what_a_loop_does_not_read_waits_with_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inbox takes so many messages and no more: memory is bounded, and nothing is lost."""
    monkeypatch.setattr("tandem.wire.sockets.RECEIVE_QUEUE_FRAMES", 10)
    size, count = 300_000, 60

    async def main() -> None:
        done = asyncio.Event()
        heard: list[int] = []

        def on_message(message: Cancel) -> None:
            heard.append(int(message.request_ids[1]))
            if len(heard) == count:
                done.set()

        inbox: LoopInbox[Any] = LoopInbox("127.0.0.1", ToNode, on_message, name="test")
        outbox = Outbox()
        for index in range(count):
            outbox.send(inbox.endpoint, Cancel("x" * size, ["x", str(index)]))
        inbox.listen()
        async with asyncio.timeout(30):
            await done.wait()
        assert heard == list(range(count))
        outbox.close()
        inbox.close()

    asyncio.run(main())


def test_a_message_that_comes_before_the_loop_listens_waits() -> None:
    async def main() -> None:
        heard = asyncio.get_running_loop().create_future()
        inbox: LoopInbox[Any] = LoopInbox("127.0.0.1", ToNode, heard.set_result, name="test")
        outbox = Outbox()
        outbox.send(inbox.endpoint, Ping("early"))
        inbox.listen()
        async with asyncio.timeout(10):
            assert await heard == Ping("early")
        outbox.close()
        inbox.close()

    asyncio.run(main())


def test_after_closing_nothing_more_is_handled() -> None:
    async def work(listener: Listener) -> None:
        def on_message(message: Any) -> None:
            listener.messages.append(message)
            listener.inbox.close()

        listener.on_message = on_message  # type: ignore[method-assign]
        for index in range(10):
            listener.outbox.send(listener.inbox.endpoint, Ping(str(index)))
        while not listener.messages:  # noqa: ASYNC110 (the handler is ours)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert listener.messages == [Ping("0")]

    run(work)


def test_closing_twice_is_once_and_an_address_is_checked() -> None:
    async def work(listener: Listener) -> None:
        listener.inbox.close()
        listener.inbox.close()
        with pytest.raises(ConfigurationError):
            LoopInbox("not-an-address", ToNode, lambda message: None, name="test")

    run(work)
