from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tandem.kvtransfer.protocol import channel
from tandem.kvtransfer.protocol.channel import ListenerProbe, SideChannel
from tandem.wire.handoff import CancelTransfer, Envelope, HandoffMessage
from tests.waiting import until


def cancel(name: str = "t") -> CancelTransfer:
    return CancelTransfer(Envelope("n", 1, 2, "tcp://127.0.0.1:9"), name)


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
def receiver():  # type: ignore[no-untyped-def]
    receiver = Receiver()
    yield receiver
    receiver.channel.close()


def test_a_message_arrives(receiver: Receiver) -> None:
    receiver.channel.send(receiver.channel.endpoint, cancel())
    receiver.wait_for(1)
    assert receiver.messages == [cancel()]


@pytest.mark.parametrize(
    "endpoint",
    ["", "ipc:///tmp/x", "inproc://x", "tcp://", "tcp://:", "tcp://nowhere", "tcp://some-host-name:80", "x"],
)
def test_an_endpoint_that_cannot_be_is_counted_and_harms_nobody(receiver: Receiver, endpoint: str) -> None:
    receiver.channel.send(endpoint, cancel())
    assert receiver.channel.undeliverable == 1


def test_the_number_of_connections_is_bounded(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_ENDPOINTS", 3)
    for port in range(9000, 9010):
        receiver.channel.send(f"tcp://127.0.0.1:{port}", cancel())
    assert len(receiver.channel._used) == 3
    receiver.channel.send(receiver.channel.endpoint, cancel())
    receiver.wait_for(1)


def test_as_many_connections_as_are_kept_can_be_made(receiver: Receiver) -> None:
    for port in range(20_000, 20_000 + channel.MAX_ENDPOINTS):
        receiver.channel.send(f"tcp://127.0.0.1:{port}", cancel())
    assert receiver.channel.undeliverable == 0
    assert len(receiver.channel._used) == channel.MAX_ENDPOINTS


# ── whether anybody listens ──


def ask(probe: ListenerProbe, endpoint: str) -> bool:
    """A connection on this machine is decided at once, but not within the call that begins it."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if probe.refused(endpoint):
            return True
        if endpoint not in probe._attempts:
            return False
    raise AssertionError("no answer from the loopback device")


def test_an_address_that_refuses_is_known_to_be_dead_and_one_that_accepts_is_not() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    now = [0.0]
    probe = ListenerProbe(lambda: now[0])
    assert not ask(probe, endpoint)
    listening.close()
    assert not probe.refused(endpoint)  # not asked again so soon
    now[0] += channel.PROBE_AGAIN_S + 1
    assert ask(probe, endpoint)
    probe.close()


@pytest.mark.parametrize(
    "endpoint", ["tcp://some-host-name:80", "tcp://", "nonsense", "tcp://[::1", "tcp://1.2.3.4:x"]
)
def test_an_address_that_cannot_be_asked_without_waiting_is_not_called_dead(endpoint: str) -> None:
    probe = ListenerProbe()
    assert not probe.refused(endpoint)
    probe.close()


def test_an_address_is_asked_whatever_number_the_connection_gets() -> None:
    """A node with many connections has descriptors that select() does not take."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    probe = ListenerProbe()
    taken = [os.dup(0) for _ in range(1100)]
    try:
        assert ask(probe, endpoint)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        probe.close()


def test_an_address_that_never_answers_costs_no_descriptor_for_ever() -> None:
    """A machine that was lost does not refuse, and nobody asks for it again when its transfers are over."""
    now = [0.0]
    probe = ListenerProbe(lambda: now[0])
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(0)
    lost = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    waiting: list[socket.socket] = []
    while not probe._attempts:  # until its queue is full, and more is not even refused
        assert not probe.refused(lost)
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(listening.getsockname())
        now[0] += channel.PROBE_AGAIN_S
    [attempt] = probe._attempts.values()
    now[0] += channel.PROBE_PATIENCE_S
    assert not probe.refused("tcp://some-host-name:80")
    assert not probe._attempts
    assert not probe._not_before
    assert attempt.connection.fileno() == -1
    for connection in (*waiting, listening):
        connection.close()
    probe.close()


def test_peers_that_nothing_is_sent_to_any_more_keep_no_descriptor() -> None:
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
            now[0] += channel.IDLE_S / 2
            sender.send(f"tcp://127.0.0.1:{port}", cancel())
            sender.send(receiver.channel.endpoint, cancel(f"t{port}"))
        receiver.wait_for(61)
        assert len(sender._used) <= 4
        # A connection under way has a descriptor of its own for a moment, and one that is dropped until ZMQ's thread
        # has come to it.
        until(lambda: descriptors() - before <= 12)
        now[0] += 10 * channel.IDLE_S
        sender.send(receiver.channel.endpoint, cancel("again"))
        receiver.wait_for(62)
    finally:
        sender.close()
        receiver.channel.close()
