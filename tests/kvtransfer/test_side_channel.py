from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tandem.kvtransfer.protocol import endpoint
from tandem.kvtransfer.protocol.endpoint import SideChannel
from tandem.wire.handoff import CancelTransfer, Envelope, HandoffMessage
from tandem.wire.sockets import Outbox
from tests.waiting import until
from tests.wire.members import endpoint_at


def cancel(name: str = "t") -> CancelTransfer:
    return CancelTransfer(Envelope("n", 1, 2, "tcp://127.0.0.1:9"), name)


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The endpoints that a channel of this test keeps a connection to."""
    kept = set[str]()

    class CountedOutbox(Outbox):
        def send(self, endpoint: str, message: msgspec.Struct) -> None:
            super().send(endpoint, message)
            kept.add(endpoint)

        def forget(self, endpoint: str) -> None:
            super().forget(endpoint)
            kept.discard(endpoint)

    monkeypatch.setattr(endpoint, "Outbox", CountedOutbox)
    return kept


class Receiver:
    def __init__(self) -> None:
        self.messages: list[HandoffMessage] = []
        self._arrived = threading.Condition()
        self.channel = SideChannel("127.0.0.1", "test", self._take)

    def _take(self, message: HandoffMessage) -> None:
        with self._arrived:
            self.messages.append(message)
            self._arrived.notify_all()

    def wait_for(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.messages) >= count, 10), len(self.messages)


@pytest.fixture
def receiver(connections: set[str]) -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.channel.close()


@pytest.mark.parametrize(
    "endpoint", ["", "ipc:///tmp/x", "inproc://x", "tcp://", "tcp://:", "tcp://nowhere", "tcp://some-host-name:80", "x"]
)
def test_an_endpoint_that_cannot_be_harms_nobody(receiver: Receiver, connections: set[str], endpoint: str) -> None:
    receiver.channel.send(endpoint, cancel())
    assert not connections
    receiver.channel.send(receiver.channel.endpoint, cancel())
    receiver.wait_for(1)
    assert receiver.messages == [cancel()]


class UnusedOutbox:
    """Connects to nothing."""

    def __init__(self, **_: float) -> None: ...
    def send(self, *_: object) -> None: ...
    def forget(self, _: str) -> None: ...
    def close(self) -> None: ...


def test_several_threads_may_send_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the step thread and the one that reads tiers do, while connections that were not used for long are dropped."""
    monkeypatch.setattr(endpoint, "IDLE_S", -1.0)
    monkeypatch.setattr(endpoint, "Outbox", UnusedOutbox)
    channel = Receiver().channel
    endpoints = [endpoint_at(port) for port in range(9000, 9003)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def send() -> None:
        for number in range(5000):
            channel.send(endpoints[number % len(endpoints)], cancel())

    try:
        with ThreadPoolExecutor(4) as threads:
            for sent in [threads.submit(send) for _ in range(4)]:
                sent.result()
    finally:
        sys.setswitchinterval(interval)
        channel.close()


def test_the_number_of_connections_is_bounded(
    receiver: Receiver, connections: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_ENDPOINTS", 3)
    for port in range(9000, 9010):
        receiver.channel.send(endpoint_at(port), cancel())
    assert len(connections) == 3
    receiver.channel.send(receiver.channel.endpoint, cancel())
    receiver.wait_for(1)


def test_as_many_connections_as_are_kept_can_be_made(receiver: Receiver, connections: set[str]) -> None:
    for port in range(20_000, 20_000 + endpoint.MAX_ENDPOINTS):
        receiver.channel.send(endpoint_at(port), cancel())
    assert len(connections) == endpoint.MAX_ENDPOINTS


def test_peers_that_nothing_is_sent_to_any_more_keep_no_descriptor(connections: set[str]) -> None:
    """A node that is replaced every two minutes is another endpoint every time."""
    now = [0.0]
    receiver = Receiver()
    sender = SideChannel("127.0.0.1", "sender", lambda message: None, clock=lambda: now[0])

    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    try:
        sender.send(receiver.channel.endpoint, cancel())
        receiver.wait_for(1)
        before = descriptors()
        for port in range(20000, 20060):
            now[0] += endpoint.IDLE_S / 2
            sender.send(endpoint_at(port), cancel())
            sender.send(receiver.channel.endpoint, cancel(f"t{port}"))
        receiver.wait_for(61)
        assert len(connections) <= 4
        # A connection under way has a descriptor of its own for a moment, and one that is dropped until ZMQ's thread
        # has come to it.
        until(lambda: descriptors() - before <= 12)
        now[0] += 10 * endpoint.IDLE_S
        sender.send(receiver.channel.endpoint, cancel("again"))
        receiver.wait_for(62)
    finally:
        sender.close()
        receiver.channel.close()
