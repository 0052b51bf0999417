"""What ends a peer's writes over a network, tried with NIXL itself: a writer is stopped in the middle of a write, and goes on
when its way has been closed.

Slow: each test starts a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl.agent import NixlAgent
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.transport import NixlTransport
from tandem.kvtransfer.protocol.identity import has_ended, this_process
from tandem.kvtransfer.protocol.transport import Move, Operation
from tandem.wire.errors import TransferError
from tandem.wire.handoff import ProcessIdentity

pytestmark = pytest.mark.slow

BLOCKS, SLOTS = 200, 32
SHAPE = (BLOCKS, SLOTS, 2, 4, 16, 64)
BLOCK_BYTES = SLOTS * 2 * 4 * 16 * 64 * 4
OURS, THEIRS = 1.0, 7.0


def _transport(name: str, value: float) -> tuple[NixlTransport, torch.Tensor, Any]:
    torch.set_num_threads(1)
    cache = torch.full(SHAPE, value)
    transport = NixlTransport(NixlAgent(name, NixlOptions()))
    return transport, cache, transport.register(KVCacheMemory(cache, "m", SLOTS, 1, 1000))


def _write(transport: NixlTransport, remote: Any, blocks: range) -> str:
    ids = np.array(blocks)
    try:
        handle = transport.post(remote, Move(Operation.WRITE, "t", BLOCK_BYTES, ids, ids))
        while not transport.is_done(handle):
            time.sleep(0.001)
    except TransferError as error:
        return str(error)
    return "done"


def _writer(calls: Connection) -> None:
    os.environ["UCX_TLS"] = "tcp"
    transport, _cache, _ = _transport("writer", THEIRS)  # the memory lives as long as its name
    calls.send(this_process())
    while True:
        memory, blocks = calls.recv()
        calls.send(_write(transport, transport.connect(memory), blocks))


@pytest.fixture
def writer() -> Iterator[tuple[Connection, Any]]:
    calls, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_writer, args=(theirs,), daemon=True)
    process.start()
    yield calls, process
    process.kill()
    process.join(10)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def test_a_write_through_a_way_that_was_closed_lands_nowhere(
    writer: tuple[Connection, Any], over_tcp: None
) -> None:
    calls, process = writer
    transport, cache, memory = _transport("reader", OURS)
    assert calls.recv()
    calls.send((memory, range(1, 2)))
    assert calls.recv() == "done"
    calls.send((memory, range(1, BLOCKS)))
    until = time.monotonic() + 20
    while cache[2, 0, 0, 0, 0, 0] != THEIRS:
        assert time.monotonic() < until
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGSTOP)
    before = int((cache == THEIRS).sum())
    assert before < cache.numel() * 0.9, "it was stopped too late to tell"
    another = transport.reopen()
    assert another is not None
    assert transport.close_earlier()
    cache.fill_(OURS)
    os.kill(process.pid, signal.SIGCONT)
    assert calls.poll(30)
    assert "NIXL" in calls.recv()
    assert int((cache == THEIRS).sum()) == 0
    # The new way is as good as the first.
    calls.send((another, range(1, 9)))
    assert calls.recv() == "done"
    assert int((cache == THEIRS).sum()) == 8 * BLOCK_BYTES // 4
    transport.close()


def test_the_end_of_a_process_of_this_machine_is_seen_and_a_stop_is_not_taken_for_it(
    writer: tuple[Connection, Any],
) -> None:
    calls, process = writer
    identity: ProcessIdentity = calls.recv()
    assert identity.pid == process.pid
    assert not has_ended(identity)
    os.kill(process.pid, signal.SIGSTOP)
    assert not has_ended(identity)
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while not has_ended(identity):  # before its parent has asked for its exit code, and after
        assert time.monotonic() < until
        time.sleep(0.001)
    process.join(10)
    assert has_ended(identity)
