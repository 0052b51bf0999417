"""The NCCL connector's own part: pairs that come and go, writes that are refused, peers that never answer.

All tests here run on gloo. On a GPU only the backend and the place of the tensors differ.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tandem.base.errors import ConfigurationError, TransferError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.nccl.group import Group, StoreServer
from tandem.kvtransfer.nccl.options import NcclOptions
from tandem.kvtransfer.nccl.pair import Announce, Open, PairCallee, Rendezvous
from tandem.kvtransfer.nccl.pool import CacheUnits
from tandem.kvtransfer.nccl.transport import NcclTransport
from tandem.kvtransfer.protocol.transport import HandleId, Move, Operation, RemoteId
from tandem.wire.handoff import CacheMemory
from tandem.wire.sockets import Outbox
from tests.kvtransfer.kv_resources import leaves_nothing_behind
from tests.kvtransfer.test_random_frames import CONNECTIONS, knock
from tests.listening import listening_addresses
from tests.waiting import until
from tests.wire.members import endpoint_at

pytestmark = pytest.mark.slow  # each makes groups, and some wait for a deadline to pass

BLOCKS = 8
FAST = NcclOptions(connect_timeout_s=1.0, move_timeout_s=1.0, idle_s=60.0)


class Side:
    def __init__(self, name: str, options: NcclOptions = FAST) -> None:
        self.tensor = torch.zeros(BLOCKS, 2, 2, 1, 4, 8)
        self.cache = KVCacheMemory(self.tensor, "fake", 2, 1, 1000)
        self.transport = NcclTransport(name, "127.0.0.1", options)
        self.memory = self.transport.register(self.cache)

    def move(self, operation: Operation, ours: list[int], theirs: list[int], transfer: str = "t") -> Move:
        return Move(operation, transfer, self.cache.block_bytes, np.array(ours), np.array(theirs))

    def write(self, remote: RemoteId, ours: list[int], theirs: list[int], transfer: str = "t") -> None:
        self.finish(self.transport.post(remote, self.move(Operation.WRITE, ours, theirs, transfer)))

    def finish(self, handle: HandleId, within_s: float = 8.0) -> None:
        until(lambda: self.transport.is_done(handle), within_s)


class Held:
    """Holds back the callers' announcements until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard, self.go_on = threading.Event(), threading.Event()
        announce = PairCallee.announce

        def late(callee: PairCallee, message: Announce) -> None:
            self.heard.set()
            assert self.go_on.wait(5)
            announce(callee, message)

        monkeypatch.setattr(PairCallee, "announce", late)


def pair_threads() -> int:
    return sum(thread.name.endswith("-pair") for thread in threading.enumerate())


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    made = Side("a"), Side("b")
    yield made
    for side in made:
        side.transport.close()
        side.transport.close()  # idempotent
    until(lambda: pair_threads() == 0)


Linked = tuple[Side, Side, RemoteId]


@pytest.fixture
def linked(sides: tuple[Side, Side]) -> Linked:
    """The first is connected with the second, which expects transfer t in its block 5."""
    here, there = sides
    there.transport.expect("t", [5])
    return here, there, here.transport.connect(there.memory)


def test_a_write_that_is_not_expected_any_more_touches_nothing_and_costs_no_other_transfer(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client aborts while its KV is on its way, and another one's KV is behind it on the same pair."""
    here, there, remote = linked
    here.tensor[3], here.tensor[4] = 3.0, 4.0
    here.write(remote, [3], [5])
    there.tensor[:] = 9.0
    pairs = set(there.transport.callees)
    held = Held(monkeypatch)
    aborted = here.transport.post(remote, here.move(Operation.WRITE, [3], [5]))
    assert held.heard.wait(5)
    there.transport.expect_no_more("t")
    there.transport.expect("another", [5, 6])  # the block has been given to another request
    behind = here.transport.post(remote, here.move(Operation.WRITE, [4], [6], "another"))
    held.go_on.set()
    here.finish(aborted)
    here.finish(behind)
    assert (there.tensor[6] == 4.0).all()
    there.tensor[6] = 9.0
    assert (there.tensor == 9.0).all()
    assert set(there.transport.callees) == pairs


def test_a_write_to_blocks_of_another_transfer_ends_the_pair_and_touches_nothing(linked: Linked) -> None:
    here, there, remote = linked
    here.tensor[:] = 1.0
    there.transport.expect("another", [6])
    with pytest.raises(TransferError, match="not its transfer's"):
        here.write(remote, [3], [6])
    assert (there.tensor == 0.0).all()


def test_a_pair_that_nobody_needs_is_taken_down_and_made_again() -> None:
    options = msgspec.structs.replace(FAST, idle_s=0.1)
    here, there = Side("a", options), Side("b", options)
    try:
        remote = here.transport.connect(there.memory)
        there.transport.expect("t", [5])
        for round_ in (1.0, 2.0):
            here.tensor[3] = round_
            here.write(remote, [3], [5])
            assert (there.tensor[5] == round_).all()
            until(lambda: pair_threads() == 0)
    finally:
        here.transport.close()
        there.transport.close()


def test_nodes_join_and_leave_while_others_work(linked: Linked) -> None:
    here, _, remote = linked
    here.write(remote, [3], [5])
    joined = Side("c")
    joined.transport.expect("t", [4])
    to_joined = here.transport.connect(joined.memory)
    here.write(to_joined, [3], [4])
    joined.transport.close()
    with pytest.raises(TransferError):
        here.write(to_joined, [3], [4])
    here.write(remote, [3], [5])
    # The same node, started again.
    again = Side("c")
    again.transport.expect("t", [4])
    here.transport.disconnect(to_joined)
    here.write(here.transport.connect(again.memory), [3], [4])
    again.transport.close()


def test_a_peer_that_cannot_be_reached_fails_the_move_in_time(sides: tuple[Side, Side]) -> None:
    here, there = sides
    gone = msgspec.msgpack.encode(Rendezvous(endpoint_at(9), b"k" * 16, "gloo"))
    remote = here.transport.connect(msgspec.structs.replace(there.memory, agent_metadata=gone))
    handle = here.transport.post(remote, here.move(Operation.WRITE, [3], [5]))
    with pytest.raises(TransferError, match=r"torch\.distributed"):
        here.finish(handle, within_s=5 * FAST.connect_timeout_s)
    with pytest.raises(TransferError):
        here.transport.post(remote, here.move(Operation.WRITE, [3], [5]))
    began = time.monotonic()
    here.transport.disconnect(remote)
    assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("operation", list(Operation))
def test_a_peer_that_stops_answering_fails_the_move_in_time(
    linked: Linked, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _, remote = linked
    here.write(remote, [3], [5])
    heard = threading.Event()
    monkeypatch.setattr(PairCallee, "announce", lambda self, message: heard.set())
    handle = here.transport.post(remote, here.move(operation, [3], [5]))
    assert heard.wait(5)
    with pytest.raises(TransferError):
        here.finish(handle, within_s=5 * FAST.move_timeout_s)


def test_a_connection_that_waits_can_be_given_up_at_once(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = sides
    there.transport.expect("t", [5])
    slow = msgspec.structs.replace(FAST, move_timeout_s=600.0)
    patient = Side("patient", slow)
    try:
        remote = patient.transport.connect(there.memory)
        patient.write(remote, [3], [5])
        heard = threading.Event()
        monkeypatch.setattr(PairCallee, "announce", lambda self, message: heard.set())
        patient.transport.post(remote, patient.move(Operation.READ, [3], [5]))
        assert heard.wait(5)
        began = time.monotonic()
        patient.transport.disconnect(remote)
        assert time.monotonic() - began < 1.5
        assert here.transport.refused == 0
    finally:
        patient.transport.close()


def test_what_waits_for_a_group_is_taken_back_at_once(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = sides
    never = threading.Event()
    monkeypatch.setattr(PairCallee, "_make_group", lambda *_: never.wait(30))
    patient = Side("patient", msgspec.structs.replace(FAST, connect_timeout_s=3.0))
    remote = patient.transport.connect(there.memory)
    for operation in Operation:
        handle = patient.transport.post(remote, patient.move(operation, [3], [5]))
        assert not patient.transport.is_done(handle)
        assert patient.transport.cancel(handle)
    never.set()
    patient.transport.close()


def test_a_read_can_be_taken_back_and_the_pair_goes_on(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = sides
    remote = here.transport.connect(there.memory)
    there.tensor[5] = 5.0
    held = Held(monkeypatch)
    patient = here.transport.post(remote, here.move(Operation.READ, [3], [5]))
    assert held.heard.wait(5)
    assert here.transport.cancel(patient)
    held.go_on.set()
    here.finish(here.transport.post(remote, here.move(Operation.READ, [4], [5])))
    assert (here.tensor[3] == 0.0).all()
    assert (here.tensor[4] == 5.0).all()


def test_a_write_that_has_begun_is_not_taken_back(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _, remote = linked
    held = Held(monkeypatch)
    handle = here.transport.post(remote, here.move(Operation.WRITE, [3], [5]))
    assert held.heard.wait(5)
    assert not here.transport.cancel(handle)
    held.go_on.set()
    here.finish(handle)


A_MEMBER_THAT_DIES = """
import os
import torch.distributed as dist
from tandem.kvtransfer.nccl.group import Group

class Store(dist.Store):
    def set(self, key, value):
        if not key.startswith("here/"):  # where it can be reached
            print(key, bytes(value).hex(), flush=True)
            os._exit(0)

    def wait(self, keys, timeout=None):
        pass

Group("gloo", Store(), 1, "127.0.0.1", 30.0)
"""


def test_a_member_that_dies_while_the_group_is_made_is_not_waited_for_again_and_again() -> None:
    said = subprocess.run(
        [sys.executable, "-c", A_MEMBER_THAT_DIES], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout
    key, address = said.split()
    server: Any = StoreServer("127.0.0.1", 30.0).store
    server.set("here/1", "")
    server.set(key, bytes.fromhex(address))
    began = time.monotonic()
    with pytest.raises(TransferError, match="making a group"):
        Group("gloo", server, 0, "127.0.0.1", 3.0)
    assert time.monotonic() - began < 3 * 3.0  # gloo tries five times


def test_nothing_is_left_behind() -> None:
    def round_trip() -> None:
        here, there = Side("a"), Side("b")
        there.transport.expect("t", [5])
        here.write(here.transport.connect(there.memory), [3], [5])
        here.transport.close()
        there.transport.close()

    leaves_nothing_behind(round_trip)


# ── what peers may say ──


def test_who_does_not_have_the_key_gets_no_pair_and_what_is_no_message_is_counted(sides: tuple[Side, Side]) -> None:
    _, there = sides
    outbox, to = Outbox(), msgspec.msgpack.decode(there.memory.agent_metadata, type=Rendezvous).endpoint
    outbox.send(to, Open("p", b"wrong", "x", endpoint_at(9), "127.0.0.1", 9))
    outbox.send(to, Announce("no such pair", 1, Operation.READ, "t", 64, [1]))
    outbox.send_frame(to, b"x" * 20)
    until(lambda: (there.transport.refused, there.transport.malformed_frames) == (2, 1))
    assert pair_threads() == 0
    outbox.close()


def test_bytes_at_the_sockets_of_torch_distributed_harm_no_pair() -> None:
    chance, before = random.Random(5), listening_addresses()
    patient = msgspec.structs.replace(FAST, connect_timeout_s=2.0, move_timeout_s=2.0)
    here, there = Side("a", patient), Side("b", patient)
    try:
        there.transport.expect("t", [5])
        remote = here.transport.connect(there.memory)
        here.write(remote, [3], [5])
        opened = listening_addresses() - before
        assert opened
        for _, port in opened:
            for _ in range(CONNECTIONS):
                knock(port, chance)
        here.write(remote, [3], [5])
    finally:
        here.transport.close()
        there.transport.close()


@pytest.mark.parametrize(
    ("unit_bytes", "units"),
    [(0, [1]), (-4, [1]), (64, []), (64, [-1]), (64, [1 << 60]), (1 << 40, [0]), (512, [0] * (1 << 18))],
)
def test_units_that_are_not_there_end_the_pair_and_touch_nothing(
    linked: Linked, unit_bytes: int, units: list[int]
) -> None:
    here, there, remote = linked
    here.write(remote, [3], [5])
    before = there.tensor.clone()
    [callee] = there.transport.callees.values()
    callee.announce(Announce(callee.pair_id, 99, Operation.WRITE, "t", unit_bytes, units))
    until(lambda: not there.transport.callees)
    assert torch.equal(there.tensor, before)
    with pytest.raises(TransferError):
        here.write(remote, [3], [5])


@pytest.mark.parametrize("call", ["scatter", "blocks_of"])
def test_a_write_that_the_peer_had_no_memory_for_is_not_called_done(
    linked: Linked, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    here, _, remote = linked

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CacheUnits, call, out_of_memory)
    with pytest.raises(TransferError, match="could not take a write: CUDA out of memory"):
        here.write(remote, [3], [5])


@pytest.mark.parametrize("metadata", [b"", b"nonsense", msgspec.msgpack.encode(Rendezvous("ipc://x", b"", "gloo"))])
def test_a_description_that_leads_nowhere_is_refused(sides: tuple[Side, Side], metadata: bytes) -> None:
    here, there = sides
    memory: CacheMemory = msgspec.structs.replace(there.memory, agent_metadata=metadata)
    with pytest.raises(TransferError):
        here.transport.connect(memory)


@pytest.mark.parametrize(
    "options", [{"backend": "nccl"}, {"backend": "tape"}, {"idle_s": "0"}, {"layerwise_tokens": "-1"}, {"x": "1"}]
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"transfer\.options"):
        Side("a", NcclOptions.parse(options))
