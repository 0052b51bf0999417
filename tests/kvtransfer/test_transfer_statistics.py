"""What is counted of the bytes of transfers."""

from __future__ import annotations

from kv_fake_network import BLOCK_BYTES, Receive, Send

from tests.kvtransfer.test_protocol_rules import TOKENS, Pair


def first_layer_computed() -> tuple[Pair, Receive, Send]:
    pair = Pair()
    receive, send = pair.begin()
    pair.producer.begin_computing(send, len(TOKENS))
    pair.producer.tell_of_first_layer(send)
    return pair, receive, send


def end(pair: Pair, receive: Receive, send: Send) -> None:
    pair.producer.end_computing(send)
    pair.producer.finish_send(send)
    pair.world.settle(0.5)
    assert receive.finished


def test_layers_that_arrived_while_the_next_was_computed_are_overlapped_bytes() -> None:
    pair, receive, send = first_layer_computed()
    pair.world.settle(0.2)
    assert pair.stats()[0].bytes_overlapped == pair.stats()[0].bytes_sent > 0
    end(pair, receive, send)
    stats = pair.stats()[0]
    assert (stats.bytes_sent, stats.blocks_sent) == (6 * BLOCK_BYTES, 6)
    assert 0.2 < stats.bytes_overlapped / stats.bytes_sent < 0.6  # one of two layers, of as many blocks as fit
    assert stats.recent[0].bytes_overlapped == stats.bytes_overlapped


def test_a_chunk_of_which_no_layer_has_left_when_it_is_computed_goes_in_whole_blocks() -> None:
    pair, receive, send = first_layer_computed()
    end(pair, receive, send)
    stats = pair.stats()[0]
    assert (stats.bytes_sent, stats.blocks_sent, stats.descriptors_sent) == (6 * BLOCK_BYTES, 6, 6)


def test_unequal_blocks_count_as_the_consumers_and_what_is_empty_is_not_moved() -> None:
    pair = Pair()
    pair.consumer = pair.world.add("c", 22, skew=-700.0, block_size=8)
    receive, send = pair.begin()
    pair.complete(send, 0.5)
    assert receive.finished
    sent, received = pair.stats()
    assert sent.blocks_sent == received.blocks_received == 3
    assert sent.blocks_freed == {"sent": 6}
    assert sent.bytes_sent == 6 * BLOCK_BYTES
    assert sent.descriptors_sent == 6 * 4  # layers × keys and values, of every grain
