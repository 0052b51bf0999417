"""What is counted of the bytes of transfers."""

from __future__ import annotations

from kv_fake_network import BLOCK_BYTES, Node, Receive, Send, World

from tandem.kvtransfer.base import TransferStats

TOKENS = list(range(50, 72))  # five full blocks and half of one


class Scene:
    def __init__(self, *, consumer_block_size: int = 4) -> None:
        self.world = World()
        self.producer: Node = self.world.add("p", 11)
        self.consumer: Node = self.world.add("c", 22, skew=-700.0, block_size=consumer_block_size)
        self.receive = Receive("r1", "t-r1", TOKENS, 0, [])
        self.send = Send("r1", "t-r1", TOKENS, self.consumer.address, [])

    def computed(self) -> None:
        """The prompt is done, and its blocks are kept; nothing has arrived."""
        self._both_begin()
        self.producer.compute(self.send, len(TOKENS))
        self.producer.finish_send(self.send)

    def first_layer_computed(self) -> None:
        self._both_begin()
        self.producer.begin_computing(self.send, len(TOKENS))
        self.producer.tell_of_first_layer(self.send)

    def _both_begin(self) -> None:
        self.consumer.start_receive(self.receive, self.producer.address)
        self.producer.start_send(self.send)
        self.world.deliver_all()

    def sent(self) -> TransferStats:
        return self.producer.recorder.snapshot(0)


def test_layers_that_arrived_while_the_next_was_computed_are_overlapped_bytes() -> None:
    scene = Scene()
    scene.first_layer_computed()
    scene.world.settle(0.2)
    assert scene.sent().bytes_overlapped == scene.sent().bytes_sent > 0
    scene.producer.end_computing(scene.send)
    scene.producer.finish_send(scene.send)
    scene.world.settle(0.5)
    assert scene.receive.finished
    stats = scene.sent()
    assert stats.bytes_sent == 6 * BLOCK_BYTES
    assert stats.blocks_sent == 6
    assert 0.2 < stats.bytes_overlapped / stats.bytes_sent < 0.6  # one of two layers, of as many blocks as fit
    assert stats.recent[0].bytes_overlapped == stats.bytes_overlapped


def test_a_chunk_of_which_no_layer_has_left_when_it_is_computed_goes_in_whole_blocks() -> None:
    scene = Scene()
    scene.first_layer_computed()
    scene.producer.end_computing(scene.send)
    scene.producer.finish_send(scene.send)
    scene.world.settle(0.5)
    assert scene.receive.finished
    stats = scene.sent()
    assert (stats.bytes_sent, stats.blocks_sent, stats.descriptors_sent) == (6 * BLOCK_BYTES, 6, 6)


def test_unequal_blocks_count_as_the_consumers_and_what_is_empty_is_not_moved() -> None:
    scene = Scene(consumer_block_size=8)
    scene.computed()
    scene.world.settle(0.5)
    assert scene.receive.finished
    stats = scene.sent()
    assert stats.blocks_sent == scene.consumer.recorder.snapshot(0).blocks_received == 3
    assert stats.blocks_freed == {"sent": 6}
    assert stats.bytes_sent == 6 * BLOCK_BYTES
    assert stats.descriptors_sent == 6 * 4  # layers × keys and values, of every grain
