"""Random bytes at the sockets of the pairs: each frame is counted and refused, and no thread dies."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nccl import transport as transport_of_pairs
from tandem.kvtransfer.nccl.options import NcclOptions
from tandem.kvtransfer.nccl.pair import Announce, Leave, PairMessage, Rendezvous
from tandem.kvtransfer.nccl.transport import NcclTransport
from tandem.kvtransfer.protocol.transport import Move, Operation
from tandem.wire.handoff import CancelTransfer, Envelope
from tandem.wire.sockets import Inbox, Outbox
from tests.kvtransfer.test_random_frames import (
    CONNECTIONS,
    ListeningEndpoint,
    knock,
    send_no_frames,
    send_random_frames,
)
from tests.listening import listening_addresses
from tests.waiting import until
from tests.wire.members import connect_as_member

pytestmark = pytest.mark.slow


@contextmanager
def pairs() -> Iterator[ListeningEndpoint]:
    inboxes: list[Inbox[PairMessage]] = []

    def opened(host: str, kind: Any, on_message: Callable[[PairMessage], None], *, name: str) -> Inbox[PairMessage]:
        def handle(message: PairMessage) -> None:
            on_message(message)
            listening.take(message)

        inboxes.append(Inbox(host, kind, handle, name=name))
        return inboxes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_of_pairs, "Inbox", opened)
        transport = _nccl("n")
    (inbox,) = inboxes
    whole = Announce("p" * 32, 7, Operation.WRITE, "t", 64, list(range(20)))
    listening = ListeningEndpoint(inbox.endpoint, lambda: transport.malformed_frames, whole)
    yield listening
    assert inbox.died is None
    transport.close()


def _nccl(name: str) -> NcclTransport:
    transport = NcclTransport(name, "127.0.0.1", NcclOptions(connect_timeout_s=2.0, move_timeout_s=2.0))
    tensor = torch.zeros(8, 2, 2, 1, 4, 8)
    transport.described = transport.register(KVCacheMemory(tensor, "m", 2, 1, 1000))  # type: ignore[attr-defined]
    return transport


@pytest.mark.timeout(300)
def test_random_frames_are_counted_and_nothing_else_happens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    send_random_frames(pairs)


def test_bytes_that_are_no_frames_harm_nobody() -> None:
    send_no_frames(pairs)


def test_bytes_at_the_sockets_of_torch_distributed_harm_no_pair() -> None:
    chance = random.Random(5)
    before = listening_addresses()
    here, there, outbox = _nccl("a"), _nccl("b"), Outbox()
    try:
        there.expect("t", [5])
        remote = here.connect(there.described)  # type: ignore[attr-defined]

        def write() -> None:
            move = Move(Operation.WRITE, "t", 512, np.array([3]), np.array([5]))
            handle = here.post(remote, move)
            while not here.is_done(handle):
                threading.Event().wait(0.002)

        write()
        opened = listening_addresses() - before
        assert opened
        for _, port in opened:
            for _ in range(CONNECTIONS):
                knock(port, chance)
        write()
        described = there.described  # type: ignore[attr-defined]
        outbox.send(msgspec.msgpack.decode(described.agent_metadata, type=Rendezvous).endpoint, Leave("no such pair"))
        until(lambda: there.refused == 1)
    finally:
        outbox.close()
        here.close()
        there.close()


def test_a_message_of_another_channel_is_refused_too() -> None:
    context = zmq.Context()
    with pairs() as listening:
        sender = context.socket(zmq.PUSH)
        connect_as_member(sender, listening.endpoint)
        sender.send(msgspec.msgpack.encode(CancelTransfer(Envelope("n", 1, 2, "tcp://x"), "t")))
        sender.send(msgspec.msgpack.encode(listening.whole))
        assert listening.arrived.wait(10)
        assert listening.malformed() == 1
        sender.close(linger=0)
    context.term()
