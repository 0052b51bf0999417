"""Closing a way ends a peer's writes over a network or between containers. With NIXL itself: a writer is stopped in the middle of a write,
and continues after its way has been closed.

Slow: each test starts a process of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.transport import NixlAgent, NixlTransport
from tandem.kvtransfer.protocol.processes import has_ended, this_process
from tandem.kvtransfer.protocol.transport import Move, Operation
from tandem.wire.handoff import ProcessIdentity

pytestmark = pytest.mark.slow

BLOCKS, SLOTS = 200, 32
SHAPE = (BLOCKS, SLOTS, 2, 4, 16, 64)
BLOCK_BYTES = SLOTS * 2 * 4 * 16 * 64 * 4
OURS, THEIRS = 1.0, 7.0
_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000  # CLONE_NEWNS, CLONE_NEWPID
_SIGNAL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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
    transport, _cache, _ = _transport("writer", THEIRS)  # the memory lives as long as its name
    calls.send(this_process())
    while True:
        memory, blocks = calls.recv()
        calls.send(_write(transport, transport.connect(memory), blocks))


def _writer_over_tcp(calls: Connection) -> None:
    os.environ["UCX_TLS"] = "tcp"
    _writer(calls)


class Writer(NamedTuple):
    calls: Connection
    pid: int  # as this process numbers it


@pytest.fixture
def begin() -> Iterator[Callable[[Callable[[Connection], None]], Writer]]:
    context = multiprocessing.get_context("spawn")
    processes = []

    def begin(target: Callable[[Connection], None]) -> Writer:
        calls, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs,))
        process.start()
        processes.append(process)
        assert process.pid is not None
        return Writer(calls, process.pid)

    yield begin
    for process in processes:
        process.kill()
        process.join(10)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def _stop_in_the_middle_and_close(writer: Writer, process: int) -> None:
    """Stops `process`, which writes for `writer`, in the middle of a write, and closes the way. A new way must work as well as the first."""
    transport, cache, memory = _transport("reader", OURS)
    identity = writer.calls.recv()
    writer.calls.send((memory, range(1, 2)))
    assert writer.calls.recv() == "done"
    writer.calls.send((memory, range(1, BLOCKS)))
    until = time.monotonic() + 20
    while cache[2, 0, 0, 0, 0, 0] != THEIRS:
        assert time.monotonic() < until
        time.sleep(0.0005)
    os.kill(process, signal.SIGSTOP)
    before = int((cache == THEIRS).sum())
    assert before < cache.numel() * 0.9, "it was stopped too late to tell"
    assert not has_ended(identity)
    another = transport.reopen()
    assert another is not None
    assert transport.close_earlier()
    cache.fill_(OURS)
    os.kill(process, signal.SIGCONT)
    assert writer.calls.poll(30)
    assert "NIXL" in writer.calls.recv()
    assert int((cache == THEIRS).sum()) == 0
    writer.calls.send((another, range(1, 9)))
    assert writer.calls.recv() == "done"
    assert int((cache == THEIRS).sum()) == 8 * BLOCK_BYTES // 4
    transport.close()


def test_a_write_through_a_way_that_was_closed_lands_nowhere(
    begin: Callable[[Callable[[Connection], None]], Writer], over_tcp: None
) -> None:
    writer = begin(_writer_over_tcp)
    _stop_in_the_middle_and_close(writer, writer.pid)


def _writer_in_a_container(calls: Connection) -> None:
    """A writer as in a container: with its own PID namespace and /proc, and the host's boot id."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_PIDS):
        calls.send(f"unshare: {os.strerror(ctypes.get_errno())}")
        return
    child = os.fork()
    if child == 0:
        libc.prctl(_SIGNAL_WITH_PARENT, signal.SIGKILL)
        for words in (["--make-rprivate", "/"], ["-t", "proc", "proc", "/proc"]):
            subprocess.run(["mount", *words], check=True)
        _writer(calls)
    calls.send(child)
    os.waitpid(child, 0)


@pytest.fixture
def container(begin: Callable[[Callable[[Connection], None]], Writer]) -> Writer:
    outer = begin(_writer_in_a_container)
    child = outer.calls.recv()
    if isinstance(child, str):
        pytest.skip(f"PID namespaces cannot be made here: {child}")
    return Writer(outer.calls, child)


def test_so_does_one_of_another_container_of_this_machine(container: Writer) -> None:
    _stop_in_the_middle_and_close(container, container.pid)


def test_closing_a_way_shuts_out_other_containers_and_machines_and_no_process_beside_us(container: Writer) -> None:
    transport, _, _ = _transport("reader", OURS)
    theirs: ProcessIdentity = container.calls.recv()
    ours = this_process()
    assert theirs.machine == ours.machine
    assert theirs.pid_namespace != ours.pid_namespace
    assert transport.shuts_out(theirs)
    assert transport.shuts_out(msgspec.structs.replace(ours, machine="another"))
    assert not transport.shuts_out(ours)
    # Its number is another process's here, or none's: that proves nothing.
    os.kill(container.pid, signal.SIGSTOP)
    assert not has_ended(theirs)
    transport.close()


def test_the_end_of_a_process_of_this_machine_is_seen_and_a_stop_is_not_taken_for_it(
    begin: Callable[[Callable[[Connection], None]], Writer],
) -> None:
    writer = begin(_writer)
    identity: ProcessIdentity = writer.calls.recv()
    assert identity.pid == writer.pid
    assert not has_ended(identity)
    os.kill(writer.pid, signal.SIGSTOP)
    assert not has_ended(identity)
    os.kill(writer.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while not has_ended(identity):  # before its parent has asked for its exit code, and after
        assert time.monotonic() < until
        time.sleep(0.001)
