"""Where a transfer's time went: what both sides tell of it when it is over."""

from __future__ import annotations

from kv_fake_network import BLOCK_BYTES, Node, Receive, Send, World

from kvtransfer.protocol.statistics import REMEMBERED_SPANS, Recorder
from wire.tracing import Phase, Span

TOKENS = list(range(50, 72))  # five full blocks and half of one


def handed_over() -> tuple[Node, Node]:
    """A producer and a consumer, after one transfer in two pieces that took a second and two."""
    world = World()
    producer, consumer = world.add("p", 11), world.add("c", 22, skew=-700.0)
    consumer.start_receive(Receive("r1", "t-r1", TOKENS, 0, []), producer.address)
    send = Send("r1", "t-r1", TOKENS, consumer.address, [])
    producer.start_send(send)
    world.deliver_all()
    for tokens, seconds in ((8, 1.0), (len(TOKENS), 2.0)):
        producer.compute(send, tokens)
        world.pump()
        world.now += seconds
        while world.moves():
            for move in world.moves():
                world.complete(move)
            world.pump()
    producer.finish_send(send)
    world.settle(0.5)
    return producer, consumer


def test_a_producer_tells_of_every_piece_that_it_wrote_and_of_the_notice() -> None:
    producer, _ = handed_over()
    spans = producer.recorder.take_spans("r1")
    writes = [span for span in spans if span.phase is Phase.WRITE]
    assert sum(span.num_bytes for span in writes) == 6 * BLOCK_BYTES
    assert all(span.end >= span.start for span in spans)
    assert [span.phase for span in spans if span.phase is not Phase.WRITE] == [Phase.PLAN, Phase.NOTICE]
    assert not producer.recorder.take_spans("r1"), "taken once"


def test_a_consumer_tells_how_long_it_waited_and_how_long_until_the_producer_knew() -> None:
    _, consumer = handed_over()
    receive, register = consumer.recorder.take_spans("r1")
    assert (receive.phase, receive.tokens) == (Phase.RECEIVE, len(TOKENS))
    assert receive.seconds >= 3.0
    assert register.phase is Phase.REGISTER
    assert register.start == receive.start
    assert register.seconds < receive.seconds


def test_spans_that_nobody_asks_for_are_forgotten() -> None:
    recorder = Recorder()
    for index in range(REMEMBERED_SPANS + 1):
        recorder.keep_spans(f"r{index}", [Span(Phase.PLAN, 0, 1)])
    assert not recorder.take_spans("r0")
    assert recorder.take_spans("r1")
