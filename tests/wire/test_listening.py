"""Whether a process listens at an address, asked of the kernel without waiting."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time

import pytest

from tandem.wire.listening import AGAIN_S, ANSWER_S, PATIENCE_S, Listener, ListenerProbe
from tests.wire.members import endpoint_at


def ask(probe: ListenerProbe, endpoint: str) -> Listener:
    """A connection on this machine is decided at once, but not within the call that begins it."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        seen = probe.look(endpoint)
        if seen is not Listener.UNKNOWN:
            return seen
    raise AssertionError("no answer from the loopback device")


def test_an_address_that_refuses_is_known_to_be_dead_and_one_that_accepts_is_not() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    endpoint = endpoint_at(listening.getsockname()[1])
    now = [0.0]
    probe = ListenerProbe(lambda: now[0])
    assert ask(probe, endpoint) is Listener.ACCEPTS
    listening.close()
    assert probe.look(endpoint) is Listener.ACCEPTS, "not asked again so soon"
    now[0] += AGAIN_S + 1
    assert ask(probe, endpoint) is Listener.REFUSES
    probe.close()


@pytest.mark.parametrize(
    "endpoint", ["tcp://some-host-name:80", "tcp://", "nonsense", "tcp://[::1", "tcp://1.2.3.4:x", "tcp://1.2.3.4:80"]
)
def test_an_address_that_cannot_be_asked_without_waiting_is_not_called_dead(endpoint: str) -> None:
    probe = ListenerProbe()
    assert probe.look(endpoint) is Listener.UNKNOWN
    probe.close()


def test_a_machine_to_which_no_route_leads_is_not_said_to_accept() -> None:
    """The kernel says so at once, and the socket then tells of no error."""
    probe = ListenerProbe()
    assert ask(probe, endpoint_at(80, "255.255.255.255")) is Listener.DOES_NOT_ANSWER
    probe.close()


def test_what_cannot_be_asked_from_here_is_not_called_dead() -> None:
    """A link-local address without its interface: the kernel begins no attempt."""
    probe = ListenerProbe()
    assert {probe.look(endpoint_at(80, "fe80::1")) for _ in range(10)} == {Listener.UNKNOWN}
    probe.close()


def test_an_address_is_asked_whatever_number_the_connection_gets() -> None:
    """A node with many connections has descriptors that select() does not take."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = endpoint_at(listening.getsockname()[1])
    probe = ListenerProbe()
    taken = [os.dup(0) for _ in range(1100)]
    try:
        assert ask(probe, endpoint) is Listener.REFUSES
    finally:
        for descriptor in taken:
            os.close(descriptor)
        probe.close()


def test_a_stopped_process_still_listens() -> None:
    """Its kernel accepts for it: it is not taken for gone, however long it stands still."""
    process = multiprocessing.get_context("spawn").Process(target=_listen, args=(port := _free_port(),), daemon=True)
    process.start()
    try:
        probe = ListenerProbe()
        until = time.monotonic() + 20
        while ask(probe, endpoint_at(port)) is not Listener.ACCEPTS:
            assert time.monotonic() < until
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        assert ask(ListenerProbe(), endpoint_at(port)) is Listener.ACCEPTS
    finally:
        process.kill()
        process.join(10)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _listen(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        signal.pause()


def test_an_address_that_never_answers_costs_no_descriptor_for_ever() -> None:
    """A machine that was lost does not refuse, and it is not asked for again when its transfers are over."""
    now = [0.0]
    probe = ListenerProbe(lambda: now[0])
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(0)
    lost = endpoint_at(listening.getsockname()[1])
    waiting: list[socket.socket] = []
    while not probe.attempts:  # until its queue is full, and more is not even refused
        assert probe.look(lost) in (Listener.UNKNOWN, Listener.ACCEPTS)
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(listening.getsockname())
        now[0] += AGAIN_S
    [attempt] = probe.attempts.values()
    assert probe.look(lost) is Listener.UNKNOWN
    now[0] += ANSWER_S
    assert probe.look(lost) is Listener.DOES_NOT_ANSWER
    now[0] += PATIENCE_S
    assert probe.look("tcp://some-host-name:80") is Listener.UNKNOWN
    assert not probe.attempts
    assert not probe.accepted
    assert attempt.connection.fileno() == -1
    for connection in (*waiting, listening):
        connection.close()
    probe.close()
