"""Random bytes at every socket of a node and of a router: each frame is counted and refused, and no thread dies.

Slow: TANDEM_FRAMES frames each (default 2,000).
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from tandem.kvtransfer.protocol.endpoint import SideChannel
from tandem.wire.handoff import Envelope, RenewLease
from tandem.wire.lines import Letter, LetterToNode, LetterToRouter
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import NodeCounters, NodeStatus, Ping
from tandem.wire.sockets import Inbox
from tests.wire.members import connect_as_member, on_a_loop

pytestmark = pytest.mark.slow

FRAMES = int(os.environ.get("TANDEM_FRAMES", "2000"))
CONNECTIONS = 40


class ListeningEndpoint:
    """A socket under test: its address, the number of refused frames, and the messages that it delivered."""

    def __init__(self, endpoint: str, malformed: Callable[[], int], whole: msgspec.Struct) -> None:
        self.endpoint = endpoint
        self.malformed = malformed
        self.whole = whole
        self.arrived = threading.Event()  # the last frame, which is whole
        self.decoded = 0
        self.before = 0  # frames that come before the last: chance may make one of them the whole one

    def take(self, message: Any) -> None:
        self.decoded += 1
        if message == self.whole and self.malformed() + self.decoded > self.before:
            self.arrived.set()


def a_status() -> NodeStatus:
    counters = NodeCounters(transfers_finished={"sent": 4})
    return NodeStatus("n", Role.DECODE, 1, NodeState.READY, 1, 2, 3, 4, 5, 6, 7, 0.5, counters)


def a_letter(body: msgspec.Struct) -> Letter[Any]:
    return Letter("tcp://somewhere", 1, 2, 3, 0, 4, 5, 6, body)


@contextmanager
def side_channel() -> Iterator[ListeningEndpoint]:
    channel = SideChannel("127.0.0.1", "test", lambda message: listening.take(message))
    envelope = Envelope("n", 1, 2, "tcp://x")
    listening = ListeningEndpoint(channel.endpoint, lambda: channel.malformed, RenewLease(envelope, 3, ["t"] * 20))
    yield listening
    assert channel.died is None
    channel.close()


def _inbox(kind: Any, whole: msgspec.Struct) -> Any:
    @contextmanager
    def opened() -> Iterator[ListeningEndpoint]:
        inbox: Inbox[Any] = Inbox("127.0.0.1", kind, lambda message: listening.take(message), name="test")
        listening = ListeningEndpoint(inbox.endpoint, lambda: inbox.malformed, whole)
        yield listening
        assert inbox.died is None
        inbox.close()

    return opened


@contextmanager
def routers_loop() -> Iterator[ListeningEndpoint]:
    with on_a_loop(LetterToRouter, lambda message: listening.take(message)) as inbox:
        listening = ListeningEndpoint(inbox.endpoint, lambda: inbox.malformed, a_letter(a_status()))
        yield listening


OpenSocket = Callable[[], AbstractContextManager[ListeningEndpoint]]
SOCKETS: dict[str, OpenSocket] = {
    "a node's side channel": side_channel,
    "a node's requests": _inbox(LetterToNode, a_letter(Ping("tcp://somewhere"))),
    "a router's answers": _inbox(LetterToRouter, a_letter(a_status())),
    "a router's answers, on its loop": routers_loop,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SOCKETS)
def test_random_frames_are_counted_and_nothing_else_happens(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    chance = random.Random(7)
    context = zmq.Context()
    with SOCKETS[name]() as listening:
        whole = msgspec.msgpack.encode(listening.whole)
        listening.before = FRAMES
        sender = context.socket(zmq.PUSH)
        sender.setsockopt(zmq.SNDHWM, 0)
        connect_as_member(sender, listening.endpoint)
        for number in range(FRAMES):
            if number % 2:
                frame = chance.randbytes(chance.randrange(1, 40))
            else:  # the beginning of a right one, with a bit turned
                damaged = bytearray(whole[: chance.randrange(1, len(whole))])
                damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
                frame = bytes(damaged)
            sender.send(frame)
        sender.send(whole)
        assert listening.arrived.wait(240)
        # By chance one in many thousands is whole.
        assert listening.malformed() + listening.decoded == FRAMES + 1
        assert listening.decoded < 2 + FRAMES / 1000
        sender.close(linger=0)
    context.term()


def knock(port: int, chance: random.Random) -> None:
    """Sends bytes that are not even frames."""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.settimeout(0.01)
        try:
            connection.sendall(chance.randbytes(chance.randrange(1, 400)))
            connection.recv(100)
        except OSError:
            return


@pytest.mark.parametrize("name", SOCKETS)
def test_bytes_that_are_no_frames_harm_nobody(name: str) -> None:
    chance = random.Random(3)
    context = zmq.Context()
    with SOCKETS[name]() as listening:
        for _ in range(CONNECTIONS):
            knock(int(listening.endpoint.rpartition(":")[2]), chance)
        sender = context.socket(zmq.PUSH)
        connect_as_member(sender, listening.endpoint)
        sender.send(msgspec.msgpack.encode(listening.whole))
        assert listening.arrived.wait(10)
        sender.close(linger=0)
    context.term()
