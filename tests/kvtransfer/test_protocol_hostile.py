"""Hostile or senseless messages that decode, at any moment, from a sender that knows every id and epoch but not a request's tokens. They
may fail a transfer. They must never make the endpoint raise, and never cause a wrong answer.

One lie is left out: that a producer has closed a transfer. A consumer must believe such a message if it has both epochs, because these
are random secrets of the two nodes and the routers.
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from kv_fake_network import SETTINGS, Receive, Send, World

from tandem.kvtransfer.protocol.transport import Direction
from tandem.wire.handoff import (
    CacheFingerprint,
    CacheMemory,
    CancelTransfer,
    DestinationRegistered,
    Envelope,
    HandoffAccepted,
    HandoffMessage,
    HandoffNotice,
    Hello,
    KVArrived,
    LeaseRenewed,
    ProcessIdentity,
    Refusal,
    RefusalCode,
    RegisterDestination,
    RenewLease,
    TransferClosed,
    Welcome,
)

TOKENS = list(range(40, 61))
EXAMPLES = 50 * int(os.environ.get("TANDEM_EXAMPLES", "1"))
numbers = st.one_of(st.integers(-3, 60), st.integers(-(2**63), 2**63 - 1))
transfers = st.sampled_from(["t1", "t2", "", "t-unknown"])
tables = st.lists(st.lists(numbers, max_size=7), max_size=3)
firsts = st.lists(numbers, max_size=3)
hashes = st.sampled_from([b"", b"x" * 32])
envelopes = st.builds(
    Envelope,
    sender_id=st.sampled_from(["p", "c", "x", ""]),
    sender_epoch=st.sampled_from([11, 22, 33, -1]),
    receiver_epoch=st.sampled_from([11, 22, 33]),
    reply_to=st.sampled_from(["tcp://p", "tcp://c", "tcp://x", "", "nonsense"]),
)
memories = st.builds(
    CacheMemory,
    agent_metadata=st.sampled_from([b"p", b"c", b"zzz", b""]),
    memory_type=st.sampled_from(["DRAM", "TAPE"]),
    device_id=numbers,
    base_address=numbers,
    num_blocks=numbers,
    block_bytes=st.one_of(st.just(64), numbers),
)
texts = st.sampled_from(["m", "float32", "slot,kv,head,token,dim", "fake/push", "fake/pull", ""])
right = CacheFingerprint("m", "float32", 2, 1, 1, 4, "slot,kv,head,token,dim", "fake/push", num_slots=2)
fingerprints = st.one_of(
    st.just(right), st.builds(CacheFingerprint, texts, texts, *[numbers] * 4, texts, texts, numbers, numbers)
)
processes = st.builds(ProcessIdentity, st.sampled_from(["machine of p", "machine of c", ""]), numbers, numbers, numbers)
leases = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.just(3.0))
messages = st.one_of(
    st.builds(Hello, envelopes, fingerprints, memories, processes),
    st.builds(Welcome, envelopes, fingerprints, memories, processes, leases, numbers),
    st.builds(RegisterDestination, envelopes, numbers, transfers, numbers, hashes, firsts, tables, numbers),
    st.builds(DestinationRegistered, envelopes, numbers, transfers),
    st.builds(RenewLease, envelopes, numbers, st.lists(transfers, max_size=3)),
    st.builds(LeaseRenewed, envelopes, numbers, st.lists(transfers, max_size=3)),
    st.builds(HandoffNotice, envelopes, transfers, numbers, hashes, numbers, numbers, numbers, tables),
    st.builds(KVArrived, envelopes, transfers, numbers, numbers, st.binary(max_size=40)),
    st.builds(HandoffAccepted, envelopes, transfers),
    st.builds(CancelTransfer, envelopes, transfers),
    st.builds(Refusal, envelopes, transfers, st.sampled_from(list(RefusalCode)), st.just("why"), numbers),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("direction", list(Direction))
def test_no_message_raises_and_none_makes_a_wrong_answer(direction: Direction) -> None:
    """Slow: a hundred histories."""

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["p", "c"]), messages), max_size=30))
    def histories(hostile: list[tuple[int, str, HandoffMessage]]) -> None:
        world = World(direction)
        producer, consumer = world.add("p", 11), world.add("c", 22)
        receive = Receive("r1", "t1", TOKENS, 0, [])
        send = Send("r1", "t1", TOKENS, consumer.address, [])
        steps = [
            lambda: consumer.start_receive(receive, producer.address),
            lambda: producer.start_send(send),
            lambda: producer.compute(send, 9),
            lambda: producer.compute(send, 30),
            lambda: producer.finish_send(send),
        ]
        for progress, target, message in hostile:
            world.network.append((f"tcp://{target}", message))
            if progress == 1 and steps:
                steps.pop(0)()
            if progress >= 2:
                world.settle(0.1)
        for step in steps:
            step()
        world.settle(SETTINGS.timeout_s + 2 * SETTINGS.lease_s + 2)
        assert receive.over
        assert send.reported == 1
        assert not producer.transport.moves
        assert not consumer.transport.moves

    histories()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_closing_from_the_real_producer_before_its_time_fails_the_transfer_and_nothing_more(
    direction: Direction,
) -> None:
    world = World(direction)
    producer, consumer = world.add("p", 11), world.add("c", 22)
    receive = Receive("r1", "t1", TOKENS, 0, [])
    consumer.start_receive(receive, producer.address)
    world.deliver_all()
    closing = TransferClosed(producer.identity.envelope(22), "t1", "why not", handed_over=True)
    world.network.append(("tcp://c", closing))
    world.deliver_all()
    assert receive.finished is None
    assert receive.failed
