from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tandem.base.errors import ConfigurationError, NodeLost
from tandem.wire import sockets
from tandem.wire.requests import Cancel, Ping, ToNode
from tandem.wire.sockets import Inbox, Outbox, public_key
from tests.waiting import until
from tests.wire.members import connect_as_member, endpoint_at, on_a_loop
from tests.wire.tcp_timers import KEEPALIVE, timers_of

DEADLINE_S = 10.0


class Heard:
    """Collects messages, and lets a test wait for them."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.changed = threading.Condition()

    def __call__(self, message: Any) -> None:
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def wait(self, count: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.messages) >= count, DEADLINE_S), self.messages
        return self.messages


def inbox_again(heard: Heard, port: int) -> Inbox[Any]:
    """At the address of one that was closed: ZMQ gives it back a moment later."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return Inbox("127.0.0.1", ToNode, heard, name="again", port=port)
        except ConfigurationError:
            assert time.monotonic() < deadline


@contextlib.contextmanager
def listening(handle: Callable[[Any], None], host: str = "127.0.0.1") -> Iterator[Inbox[Any]]:
    made: Inbox[Any] = Inbox(host, ToNode, handle, name="test")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def heard() -> Heard:
    return Heard()


Open = Callable[[Callable[[Any], None]], contextlib.AbstractContextManager[Any]]


@pytest.fixture(params=["in a thread", "on a loop"])
def opened(request: pytest.FixtureRequest) -> Open:
    return listening if request.param == "in a thread" else functools.partial(on_a_loop, ToNode)


@pytest.fixture
def inbox(heard: Heard, opened: Open) -> Iterator[Any]:
    with opened(heard) as made:
        yield made


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    made = Outbox()
    yield made
    made.close()


@pytest.fixture
def raw(inbox: Inbox[Any]) -> Iterator[Callable[[list[bytes]], None]]:
    """Sends frames as they are, as a peer would that does not speak our protocol."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    connect_as_member(socket, inbox.endpoint)
    yield socket.send_multipart
    socket.close(linger=1000)
    context.term()


def test_any_thread_may_send(inbox: Inbox[Any], outbox: Outbox, heard: Heard) -> None:
    def send(name: int) -> None:
        for index in range(50):
            outbox.send(inbox.endpoint, Cancel(str(name), [str(index)]))

    threads = [threading.Thread(target=send, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    messages = heard.wait(400)
    for name in range(8):
        mine = [int(message.request_ids[0]) for message in messages if message.reply_to == str(name)]
        assert mine == list(range(50))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"nonsense"],
        [b"\x91" * 100_000],
        [b"\x81\xa4type\xa4none"],
        [b"\x81\xa4type\xa4ping"],
        [msgspec.msgpack.encode({"type": "ping", "reply_to": 5})],
        [msgspec.msgpack.encode(Ping("x")) + b"\x00"],
        [msgspec.msgpack.encode(Ping("x")), b"second"],
        [b"\x82\xa4type\xa4ping\xa8reply_to\xa2\xff\xfe"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"cos\nsystem\n(S'true'\ntR."],
    ],
)
def test_nothing_that_a_peer_sends_ends_the_stream(
    inbox: Inbox[Any], outbox: Outbox, heard: Heard, raw: Callable[[list[bytes]], None], frames: list[bytes]
) -> None:
    raw(frames)
    raw([msgspec.msgpack.encode(Ping("after"))])
    assert heard.wait(1) == [Ping("after")]
    assert inbox.malformed == 1
    assert getattr(inbox, "died", None) is None


def test_a_frame_that_is_far_too_large_is_not_even_read(
    opened: Open, outbox: Outbox, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 1000)
    with opened(heard) as small, contextlib.closing(Outbox()) as other:
        outbox.send(small.endpoint, Ping("x" * 5000))
        other.send(small.endpoint, Ping("fits"))
        assert heard.wait(1) == [Ping("fits")]


def test_an_exception_in_the_handler_is_counted_and_the_stream_goes_on(opened: Open, outbox: Outbox) -> None:
    done = threading.Event()

    def handle(message: Any) -> None:
        if message.reply_to == "bad":
            raise ValueError("a bug")
        done.set()

    with opened(handle) as inbox:
        outbox.send(inbox.endpoint, Ping("bad"))
        outbox.send(inbox.endpoint, Ping("good"))
        assert done.wait(DEADLINE_S)
        assert inbox.handler_errors == 1


def test_a_queue_that_nobody_reads_is_an_error_to_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SEND_QUEUE_FRAMES", 10)
    outbox = Outbox()

    def send_often(endpoint: str) -> None:
        for _ in range(100):
            outbox.send(endpoint, Ping("x"))

    try:
        for endpoint in (endpoint_at(9), endpoint_at(10)):
            with pytest.raises(NodeLost, match="has not read"):
                send_often(endpoint)
            outbox.forget(endpoint)
            outbox.send(endpoint, Ping("x"))  # a new connection, a new queue
    finally:
        outbox.close(linger_ms=0)


def test_a_connection_that_nothing_comes_through_is_asked_after(
    inbox: Inbox[Any], outbox: Outbox, heard: Heard
) -> None:
    """A machine that is lost closes no connection: without this they would be kept for ever."""
    outbox.send(inbox.endpoint, Ping("x"))
    heard.wait(1)
    assert timers_of(inbox.endpoint) == [KEEPALIVE]


@pytest.mark.parametrize(
    "endpoint",
    [
        "", "nonsense", "tcp://", "tcp://127.0.0.1", "http://x:1", "tcp://127.0.0.1:port", "tcp://127.0.0.1:1", "tcp://nokey@127.0.0.1:1", "ipc:///tmp/x", "inproc://x",
        "tcp://no-such-host.invalid:1", "tcp://127.0.0.1:1;127.0.0.1:2",
    ],
)  # fmt: skip
def test_an_endpoint_that_is_none(outbox: Outbox, endpoint: str) -> None:
    with pytest.raises(NodeLost, match="cannot connect"):
        outbox.send(endpoint, Ping("x"))


def test_what_was_sent_while_the_other_was_away_arrives_when_it_is_back(outbox: Outbox, heard: Heard) -> None:
    first: Inbox[Any] = Inbox("127.0.0.1", ToNode, heard, name="first")
    outbox.send(first.endpoint, Ping("1"))
    heard.wait(1)
    port = int(first.endpoint.rpartition(":")[2])
    first.close()
    second = inbox_again(heard, port)
    try:
        assert second.endpoint == first.endpoint
        # Whatever is sent before the old connection is known to be gone goes down with it: delivery is not confirmed.
        deadline, index = time.monotonic() + DEADLINE_S, 1
        while heard.messages[-1] == Ping("1"):
            assert time.monotonic() < deadline
            index += 1
            outbox.send(second.endpoint, Ping(str(index)))
            with heard.changed:
                heard.changed.wait_for(lambda: heard.messages[-1] != Ping("1"), 0.05)
        rest = [Ping(str(number)) for number in range(index + 1, index + 200)]
        for ping in rest:
            outbox.send(second.endpoint, ping)
        with heard.changed:
            assert heard.changed.wait_for(lambda: heard.messages[-1] == rest[-1], DEADLINE_S)
        assert heard.messages[-len(rest) :] == rest
    finally:
        second.close()


def test_one_endpoint_too_many_is_lost_and_the_others_go_on(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sockets of a process count: here the inbox's three, the authenticator's three, and one more."""
    monkeypatch.setattr(sockets, "MAX_SOCKETS", 7)
    monkeypatch.setattr(sockets, "shared", sockets.ProcessSockets())
    with listening(heard) as inbox, contextlib.closing(Outbox()) as outbox:
        outbox.send(inbox.endpoint, Cancel("tcp://x:1", ["a"]))
        with pytest.raises(NodeLost, match="cannot connect to 'tcp://"):
            outbox.send(endpoint_at(9), Cancel("tcp://x:1", []))
        outbox.send(inbox.endpoint, Cancel("tcp://x:1", ["b"]))
        assert [message.request_ids for message in heard.wait(2)] == [["a"], ["b"]]


def test_all_sockets_of_a_process_share_one_context_that_ends_with_the_last(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = sockets.ProcessSockets()
    monkeypatch.setattr(sockets, "shared", process)
    before = len(os.listdir("/proc/self/task"))
    pairs = [(Inbox("127.0.0.1", ToNode, heard, name=f"inbox {index}"), Outbox()) for index in range(3)]
    for inbox, outbox in pairs:
        outbox.send(inbox.endpoint, Ping("x"))
    heard.wait(3)
    assert len(os.listdir("/proc/self/task")) - before == 3 + 3, (
        "a thread per Inbox, the authenticator, ZMQ's reaper and its one I/O thread"
    )
    for inbox, outbox in pairs:
        assert process.context is not None
        assert not process.context.closed
        inbox.close()
        outbox.close()
    assert process.context is None
    with pytest.raises(ConfigurationError):
        Inbox("not-an-address", ToNode, heard, name="test")
    assert process.context is None, "one that failed holds nothing"


def test_forgetting_drops_what_is_queued(heard: Heard) -> None:
    """What was meant for a lost node must not reach its successor at the same address."""
    outbox = Outbox()
    placeholder: Inbox[Any] = Inbox("127.0.0.1", ToNode, heard, name="first")
    endpoint, port = placeholder.endpoint, int(placeholder.endpoint.rpartition(":")[2])
    placeholder.close()
    outbox.send(endpoint, Ping("for the old one"))
    outbox.forget(endpoint)
    outbox.forget(endpoint)
    successor = inbox_again(heard, port)
    try:
        outbox.send(endpoint, Ping("for the new one"))
        assert heard.wait(1) == [Ping("for the new one")]
    finally:
        successor.close()
        outbox.close()


def test_a_taken_port_is_said(inbox: Inbox[Any]) -> None:
    port = int(inbox.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
        Inbox("127.0.0.1", ToNode, lambda message: None, name="second", port=port)
    with pytest.raises(ConfigurationError):
        Inbox("not-an-address", ToNode, lambda message: None, name="third")


def test_a_thread_that_dies_says_why(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> None:
        raise OSError("the socket is gone")

    monkeypatch.setattr(Inbox, "_receive_until_closed", broken)
    inbox: Inbox[Any] = Inbox("127.0.0.1", ToNode, heard, name="test")
    until(lambda: inbox.died == "OSError: the socket is gone")
    inbox.close()


def test_ipv6(heard: Heard, outbox: Outbox) -> None:
    with contextlib.ExitStack() as opened:
        try:
            inbox = opened.enter_context(listening(heard, "::1"))
        except ConfigurationError as error:
            pytest.skip(f"this machine has no IPv6: {error}")
        assert inbox.endpoint.startswith(f"tcp://{public_key()}@[::1]:")
        outbox.send(inbox.endpoint, Ping("x"))
        assert heard.wait(1) == [Ping("x")]


def test_closing_twice_is_once_and_leaves_no_thread(heard: Heard) -> None:
    before = set(threading.enumerate())
    inbox: Inbox[Any] = Inbox("127.0.0.1", ToNode, heard, name="test")
    outbox = Outbox()
    outbox.send(inbox.endpoint, Ping("last"))
    heard.wait(1)
    for _ in range(2):
        outbox.close()
        inbox.close()
    assert set(threading.enumerate()) == before
    outbox.send(inbox.endpoint, Ping("after"))  # no peer is there to hear it


def test_closing_lets_what_was_just_sent_leave(inbox: Inbox[Any], heard: Heard) -> None:
    outbox = Outbox()
    outbox.send(inbox.endpoint, Ping("last words"))
    outbox.close()
    assert heard.wait(1) == [Ping("last words")]


def test_an_inbox_that_does_not_listen_yet_keeps_what_comes_and_can_be_closed(heard: Heard, outbox: Outbox) -> None:
    late: Inbox[Any] = Inbox("127.0.0.1", ToNode, heard, name="late", listens=False)
    outbox.send(late.endpoint, Ping("early"))
    late.listen()
    assert heard.wait(1) == [Ping("early")]
    late.close()
    never: Inbox[Any] = Inbox("127.0.0.1", ToNode, heard, name="never", listens=False)
    never.close()
    assert never.died is None
