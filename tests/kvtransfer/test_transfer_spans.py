"""Where a transfer's time went: the spans that both sides report when it is over."""

from __future__ import annotations

from kv_fake_network import BLOCK_BYTES, Node

from tandem.kvtransfer.protocol.side import REMEMBERED_TRACES, Recorder
from tandem.wire.tracing import TracePhase, TransferRecord, TransferTrace
from tests.kvtransfer.test_protocol_rules import TOKENS, Pair


def handed_over() -> tuple[Node, Node]:
    """A producer and a consumer, after one transfer in two pieces that took a second and two."""
    pair = Pair()
    world, producer, consumer = pair.world, pair.producer, pair.consumer
    pair.receive()
    send = pair.send()
    world.now += 0.25  # the handshake
    world.deliver()
    world.deliver()
    world.now += 0.5  # the registration
    world.deliver_all()
    for tokens, seconds in ((8, 1.0), (len(TOKENS), 2.0)):
        producer.compute(send, tokens)
        world.stalled = True
        world.settle_messages(seconds)
        world.stalled = False
        pair.move_everything()
    producer.finish_send(send)
    world.settle(0.5)
    return producer, consumer


def test_a_producer_tells_of_every_piece_that_it_wrote_and_of_the_notice() -> None:
    producer, _ = handed_over()
    trace = producer.recorder.take_trace("r1")
    assert trace is not None
    spans = trace.spans
    writes = [span for span in spans if span.phase is TracePhase.WRITE]
    assert sum(span.num_bytes for span in writes) == 6 * BLOCK_BYTES
    assert all(span.end >= span.start for span in spans)
    assert [span.phase for span in spans if span.phase is not TracePhase.WRITE] == [TracePhase.PLAN, TracePhase.NOTICE]
    assert producer.recorder.take_trace("r1") is None, "taken once"
    record = trace.record
    assert (record.outcome, record.num_bytes, record.blocks, record.descriptors) == ("sent", 6 * BLOCK_BYTES, 6, 6)
    assert record.bytes_overlapped == 2 * BLOCK_BYTES
    assert record.waits["last_byte"] >= 3.0
    assert set(record.waits) == {"first_byte", "last_byte", "handover"}


def test_a_consumer_tells_how_long_it_waited_and_how_long_until_the_producer_knew() -> None:
    _, consumer = handed_over()
    trace = consumer.recorder.take_trace("r1")
    assert trace is not None
    receive, handshake, register = trace.spans
    assert (receive.phase, receive.tokens) == (TracePhase.RECEIVE, len(TOKENS))
    assert receive.seconds >= 3.0
    assert (handshake.phase, handshake.start, handshake.seconds) == (TracePhase.HANDSHAKE, receive.start, 0.25)
    assert (register.phase, register.start, register.seconds) == (TracePhase.REGISTER, handshake.end, 0.5)
    assert trace.record == TransferRecord(
        "r1", "received", 6 * BLOCK_BYTES, 6, waits={"handshake": 0.25, "register": 0.5, "receive": receive.seconds}
    )


def test_traces_that_nobody_asks_for_are_forgotten() -> None:
    recorder = Recorder()
    for index in range(REMEMBERED_TRACES + 1):
        recorder.began()
        recorder.ended(TransferTrace(TransferRecord(f"r{index}", "sent", 0, 0)))
    assert recorder.take_trace("r0") is None
    assert recorder.take_trace("r1") is not None
