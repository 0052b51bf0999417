"""Which peers may connect: a member's messages arrive, a stranger gets no answer, whatever it sends and claims to be."""

from __future__ import annotations

import contextlib
import socket as tcp
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.base.errors import NodeLost
from tandem.wire import curve, sockets
from tandem.wire.curve import ProcessKeys
from tandem.wire.endpoints import Endpoint, key_bytes, key_of, parse_endpoint
from tandem.wire.requests import Ping
from tandem.wire.sockets import Inbox, Outbox, accompany, admit, public_key
from tests.waiting import until
from tests.wire.members import address_of
from tests.wire.test_sockets import Heard, listening

# ZMTP 3.1: signature, version, mechanism, whether it is the server; then what fills 64 bytes.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
MORE_FRAME = b"\x01\xff" + b"x" * 255


Call = Callable[[str, ProcessKeys | None], "Caller"]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def inbox(heard: Heard) -> Iterator[Inbox[Any]]:
    with listening(heard) as made:
        yield made
    admit([])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be named before `inbox`."""
    monkeypatch.setattr(curve, "HANDSHAKE_S", 0.2)


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    made = Outbox()
    yield made
    made.close()


class Caller:
    """A PUSH socket of another process, with its keys or without any, and what becomes of its connections."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: ProcessKeys | None) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | ENDED)
        host, port = address_of(endpoint)
        if keys is not None:
            keys.protect_caller(self._socket, endpoint)
        self._socket.connect(f"tcp://{host}:{port}")

    def say(self, name: str) -> None:
        self._socket.send(msgspec.msgpack.encode(Ping(name)))

    def next_event(self) -> int:
        assert self._monitor.poll(10_000)
        return int(recv_monitor_message(self._monitor)["event"])

    def has_event(self) -> bool:
        return bool(self._monitor.poll(0))


@pytest.fixture
def call() -> Iterator[Callable[[str, ProcessKeys | None], Caller]]:
    context = zmq.Context()
    made: list[Caller] = []  # a socket that nothing refers to is closed

    def make(endpoint: str, keys: ProcessKeys | None) -> Caller:
        made.append(Caller(context, endpoint, keys))
        return made[-1]

    yield make
    context.destroy(linger=0)


@pytest.mark.parametrize("has_keys", [False, True], ids=["without a key", "with a key that is not admitted"])
def test_a_stranger_gets_nothing(
    impatient: None, inbox: Inbox[Any], outbox: Outbox, heard: Heard, call: Call, has_keys: bool
) -> None:
    stranger = call(inbox.endpoint, ProcessKeys() if has_keys else None)
    stranger.say("stranger")
    assert [stranger.next_event(), bool(stranger.next_event() & ENDED)] == [zmq.EVENT_CONNECTED, True]
    outbox.send(inbox.endpoint, Ping("own"))
    assert heard.wait(1) == [Ping("own")]
    assert inbox.malformed == 0


def test_one_that_becomes_a_member_a_moment_later_is_heard(inbox: Inbox[Any], heard: Heard, call: Call) -> None:
    """Its key may be on its way while it speaks: its connection waits for that, and need not be made again."""
    keys = ProcessKeys()
    early = call(inbox.endpoint, keys)
    early.say("early")
    assert early.next_event() == zmq.EVENT_CONNECTED
    admit([keys.public])
    assert heard.wait(1) == [Ping("early")]
    assert not early.has_event(), "one connection was enough"


def test_one_that_was_refused_is_heard_as_soon_as_it_is_a_member(
    impatient: None, inbox: Inbox[Any], heard: Heard, call: Call
) -> None:
    keys = ProcessKeys()
    patient = call(inbox.endpoint, keys)
    patient.say("patient")
    assert [patient.next_event(), bool(patient.next_event() & ENDED)] == [zmq.EVENT_CONNECTED, True]
    admit([keys.public])
    assert heard.wait(1) == [Ping("patient")]


def test_one_that_belongs_to_this_process_stays_admitted_whatever_members_there_are(
    inbox: Inbox[Any], heard: Heard, call: Call
) -> None:
    keys = ProcessKeys()
    accompany([keys.public])
    admit([])
    call(inbox.endpoint, keys).say("companion")
    assert heard.wait(1) == [Ping("companion")]


def test_one_that_is_no_member_any_more_is_not_heard_again(
    impatient: None, inbox: Inbox[Any], outbox: Outbox, heard: Heard, call: Call
) -> None:
    keys = ProcessKeys()
    admit([keys.public])
    call(inbox.endpoint, keys).say("member")
    heard.wait(1)
    admit([])
    again = call(inbox.endpoint, keys)
    again.say("was one")
    assert [again.next_event(), bool(again.next_event() & ENDED)] == [zmq.EVENT_CONNECTED, True]
    outbox.send(inbox.endpoint, Ping("own"))
    assert heard.wait(2) == [Ping("member"), Ping("own")]


def test_another_process_at_an_address_does_not_pass_for_the_one_that_was_meant(
    inbox: Inbox[Any], outbox: Outbox, heard: Heard
) -> None:
    host, port = address_of(inbox.endpoint)
    outbox.send(str(Endpoint(ProcessKeys().public, host, port)), Ping("for another"))
    outbox.send(inbox.endpoint, Ping("for this one"))
    assert heard.wait(1) == [Ping("for this one")]


@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
def test_a_message_that_never_ends_ends_with_its_first_frame(
    inbox: Inbox[Any], outbox: Outbox, heard: Heard, mechanism: bytes
) -> None:
    """libzmq bounds a frame and not the number of a message's frames. Only a member gets as far as a message."""
    greeting = (GREETING + mechanism.ljust(20, b"\0")).ljust(64, b"\0")
    sent = 0
    with (
        tcp.create_connection(address_of(inbox.endpoint), timeout=10) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(greeting)
        while connection.recv(64):
            connection.sendall(MORE_FRAME * 100)
            sent += 100 * len(MORE_FRAME)
    assert sent < 1 << 20
    outbox.send(inbox.endpoint, Ping("own"))
    assert heard.wait(1) == [Ping("own")]


def test_strangers_by_the_hundred_keep_no_member_waiting(
    inbox: Inbox[Any], outbox: Outbox, heard: Heard, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "HANDSHAKE_S", 30.0)
    monkeypatch.setattr(curve, "MAX_HELD", 8)
    keys = ProcessKeys()
    for _ in range(100):
        call(inbox.endpoint, keys).say("stranger")
    for index in range(100):
        outbox.send(inbox.endpoint, Ping(str(index)))
    assert [message.reply_to for message in heard.wait(100)] == [str(index) for index in range(100)]
    authenticator = sockets.shared.authenticator
    assert authenticator is not None
    until(lambda: len(authenticator._held) == 8)


@pytest.fixture
def own_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be named before `inbox`: what ends with them takes no later test of this process along."""
    monkeypatch.setattr(sockets, "shared", sockets.ProcessSockets())


def test_an_authenticator_that_died_is_told_by_every_inbox(
    own_sockets: None, inbox: Inbox[Any], outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, frames: list[bytes]) -> None:
        raise OSError("out of luck")

    monkeypatch.setattr(curve.Authenticator, "_take", broken)
    assert inbox.died is None
    outbox.send(inbox.endpoint, Ping("x"))
    until(lambda: inbox.died == "OSError: out of luck")


@pytest.mark.parametrize(
    "text", ["", "x", "tcp://127.0.0.1:1", "tcp://short@127.0.0.1:1", "tcp://KEY@name:1", "tcp://KEY@127.0.0.1", "ipc://KEY@127.0.0.1:1"]
)  # fmt: skip
def test_what_is_no_endpoint(text: str) -> None:
    text = text.replace("KEY", public_key())
    assert parse_endpoint(text) is None
    with pytest.raises(ValueError, match="is no endpoint"):
        key_of(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3"])
def test_an_endpoint_is_read_as_it_is_written(host: str) -> None:
    endpoint = Endpoint(public_key(), host, 4711)
    assert parse_endpoint(str(endpoint)) == endpoint
    assert public_key() not in endpoint.address


@pytest.mark.parametrize("text", ["", "x" * 42, "x" * 44, "é" * 43, "=" * 43, " " * 43])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(ValueError, match="is no public key"):
        key_bytes(text)


def test_an_outbox_names_what_an_endpoint_must_be(outbox: Outbox) -> None:
    with pytest.raises(NodeLost, match=r"must be tcp://KEY@ADDRESS:PORT"):
        outbox.send("tcp://127.0.0.1:1", Ping("x"))
