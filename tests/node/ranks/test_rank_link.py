"""The link between two machines of one node delivers everything in order, or ends."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of_numpy

from tandem.base.errors import InternalError, NodeLost
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig
from tandem.node.ranks.link import Numbers, Relay, SendingEnd, arrays_of, step_of
from tandem.node.ranks.messages import LeadBeat, LineBytes
from tandem.node.ranks.processes import device_of_rank, ranks_on, with_memory_shared

_ARRAYS = st.lists(
    arrays_of_numpy.arrays(
        st.sampled_from([np.int32, np.int64]), arrays_of_numpy.array_shapes(min_dims=1, max_dims=2, min_side=0)
    ),
    max_size=6,
)


@given(_ARRAYS)
def test_a_step_is_on_the_other_machine_what_it_was_here(arrays: list[np.ndarray]) -> None:
    there = arrays_of(step_of(arrays))
    assert [(a.dtype, a.shape) for a in there] == [(a.dtype, a.shape) for a in arrays]
    assert all(map(np.array_equal, there, arrays))


def test_a_step_that_is_no_message_is_refused() -> None:
    with pytest.raises(InternalError, match="larger than 32 MiB"):
        step_of([np.broadcast_to(np.int64(0), (1 << 23,))])


def test_a_message_that_is_missing_ends_the_link() -> None:
    numbers = Numbers("rank 0")
    numbers.check(1)
    numbers.check(2)
    with pytest.raises(NodeLost, match="messages of rank 0 were lost: number 4 came after 2"):
        numbers.check(4)


def test_messages_leave_with_numbers_in_a_row() -> None:
    sent: list[tuple[str, object]] = []

    class Outbox:
        def send(self, endpoint: str, message: object) -> None:
            sent.append((endpoint, message))

    end = SendingEnd(Outbox(), "there", lambda number, body: (number, body))  # type: ignore[arg-type, return-value]
    for _ in range(3):
        end.send(LeadBeat(True))
    assert sent == [("there", (number, LeadBeat(True))) for number in (1, 2, 3)]


def test_a_relay_carries_both_ways_whatever_the_socket_takes_at_once() -> None:
    ours, theirs = socket.socketpair()
    passed: list[LineBytes] = []
    relay = Relay(3, theirs, passed.append)
    ours.sendall(b"to the link")
    relay.pass_on()
    relay.pass_on()  # nothing more has come
    assert passed == [LineBytes(3, b"to the link")]
    much = bytes(range(256)) * (1 << 14)
    relay.put(much)
    assert relay.has_unsent, "the socket does not hold so much"
    read = bytearray()
    while len(read) < len(much):
        read += ours.recv(1 << 20)
        relay.flush()
    assert read == much
    assert not relay.has_unsent
    ours.close()
    relay.put(b"for nothing")
    relay.pass_on()
    assert relay.is_over
    assert not relay.has_unsent
    relay.close()


@given(st.integers(1, 4), st.integers(1, 4))
def test_each_machine_has_as_many_ranks_in_order(machines: int, each: int) -> None:
    found = [rank for machine in range(machines) for rank in ranks_on(machine, machines, machines * each)]
    assert found == list(range(machines * each))


def test_ranks_of_one_machine_share_its_host_memory_and_have_gpus_of_their_own() -> None:
    engine = EngineConfig(ModelConfig("m", device="cpu"), CacheConfig(memory_share=0.6))
    assert with_memory_shared(engine, 3).cache.memory_share == pytest.approx(0.2)
    assert with_memory_shared(engine, 1) is engine
    on_gpus = EngineConfig(ModelConfig("m", device="cuda:2"), CacheConfig(memory_share=0.6))
    assert with_memory_shared(on_gpus, 3) is on_gpus
    assert [device_of_rank("cuda:2", place) for place in range(2)] == ["cuda:2", "cuda:3"]
    assert device_of_rank("cpu", 1) == "cpu"
