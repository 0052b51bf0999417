"""The published KV events, as a subscriber reads them. That they are what vLLM's own classes read is in tests/clients."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from tandem.base.errors import ConfigurationError
from tandem.engine.config import CacheConfig, EventsConfig
from tandem.node.kv_events.part import KVEventPublisher
from tandem.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

PATIENCE_MS = 10_000


class Subscriber:
    """A subscriber like vLLM's example."""

    def __init__(self, publisher: KVEventPublisher, topic: bytes) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self.sub.connect(publisher.endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def receive(self) -> tuple[bytes, int, Any]:
        topic, number, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), self.decoder.decode(payload)

    def close(self) -> None:
        self.context.destroy(linger=0)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


EVENTS: list[Any] = [
    BlockStored([b"a", b"b"], None, [1, 2, 3, 4], 2, extra_keys=[("salt:s",), None]),
    BlockStored([b"c"], b"b", [5, 6], 2, lora_name="x", group_idx=1),
    BlockRemoved([b"c"], group_idx=1),
    BlockStored([b"a"], None, [], 2, medium="CPU"),
    BlockRemoved([b"a"], "CPU"),
    AllBlocksCleared(),
]


def test_the_bytes_have_the_shape_that_vllm_reads() -> None:
    """An array of time, events and rank; an event is a map with its type, and has every field for which vLLM's classes know no default."""
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, EVENTS)))
    stored = {"type": "BlockStored", "lora_id": None, "medium": "GPU", "lora_name": None, "block_size": 2}
    assert read == [1.5, [
        {**stored, "block_hashes": [b"a", b"b"], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "extra_keys": [["salt:s"], None]},
        {**stored, "block_hashes": [b"c"], "parent_block_hash": b"b", "token_ids": [5, 6], "lora_name": "x", "group_idx": 1},
        {"type": "BlockRemoved", "block_hashes": [b"c"], "medium": "GPU", "group_idx": 1},
        {**stored, "block_hashes": [b"a"], "parent_block_hash": None, "token_ids": [], "medium": "CPU"},
        {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "CPU"},
        {"type": "AllBlocksCleared"},
    ], None]  # fmt: skip


@pytest.fixture
def publisher() -> Any:
    made = KVEventPublisher(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}", "kv", 3)
    yield made
    made.close()


def test_a_subscriber_reads_every_event_and_its_number(publisher: KVEventPublisher) -> None:
    subscriber = Subscriber(publisher, b"kv")
    try:
        while not subscriber.sub.poll(50):  # a subscription takes a moment to arrive
            publisher.publish([AllBlocksCleared()])
        _, number, _ = subscriber.receive()
        while subscriber.sub.poll(0):
            number = subscriber.receive()[1]
        publisher.publish(EVENTS)
        topic, next_number, batch = subscriber.receive()
        assert (topic, next_number) == (b"kv", number + 1)
        first, *others = batch.events
        (of_salt,), none = first.extra_keys
        assert (of_salt[:5], len(of_salt), none) == ("salt:", 37, None)
        assert [msgspec.structs.replace(first, extra_keys=EVENTS[0].extra_keys), *others] == EVENTS
        assert batch.ts > 1.6e9
    finally:
        subscriber.close()


def test_a_node_that_ends_sends_what_is_queued_first() -> None:
    publisher = KVEventPublisher(f"tcp://127.0.0.1:{free_port()}", "", "kv", 1)
    subscriber = Subscriber(publisher, b"kv")
    subscriber.sub.setsockopt(zmq.RCVHWM, 0)
    try:
        while not subscriber.sub.poll(50):
            publisher.publish([AllBlocksCleared()])
        large = BlockStored([bytes(32)] * 1000, None, list(range(10_000)), 16)
        for _ in range(500):
            publisher.publish([large])
        publisher.publish([BlockRemoved([b"last"])])
        publisher.close()
        while True:
            _, _, batch = subscriber.receive()
            if isinstance(batch.events[0], BlockRemoved):
                break
    finally:
        subscriber.close()


def test_what_was_missed_can_be_asked_for(publisher: KVEventPublisher) -> None:
    for number in range(5):
        publisher.publish([BlockRemoved([bytes([number])])])
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    asker.connect(publisher.replay_endpoint)
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    try:
        for wanted, expected in ((3, [3, 4]), (0, [2, 3, 4]), (9, []), ((1 << 64) - 1, [])):
            asker.send_multipart((b"", wanted.to_bytes(8, "big")))
            found = []
            while (frames := asker.recv_multipart())[2]:
                assert decoder.decode(frames[2]).events[0].block_hashes == [bytes([int.from_bytes(frames[1], "big")])]
                found.append(int.from_bytes(frames[1], "big"))
            assert int.from_bytes(frames[1], "big", signed=True) == -1
            assert found == expected
        asker.send_multipart((b"", b"no number"))
        asker.send_multipart((b"", (4).to_bytes(8, "big")))
        assert asker.recv_multipart()[1] == (4).to_bytes(8, "big")
    finally:
        context.destroy(linger=0)


def test_a_second_node_of_the_machine_takes_the_next_port(publisher: KVEventPublisher) -> None:
    other = KVEventPublisher(publisher.endpoint, "", "", 1)
    try:
        assert other.endpoint != publisher.endpoint
        assert other.replay_endpoint == ""
    finally:
        other.close()


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "ipc:///x", "tcp://host:5557", "tcp://1.2.3.4"])  # fmt: skip
def test_it_is_bound_to_a_named_address(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cache\.events\.endpoint must be tcp://ADDRESS:PORT"):
        EventsConfig(endpoint=endpoint)


def test_it_needs_a_prefix_cache_and_a_replay_something_to_ask_for() -> None:
    with pytest.raises(ConfigurationError, match=r"needs cache\.prefix_caching"):
        CacheConfig(prefix_caching=False, events=EventsConfig(endpoint="tcp://127.0.0.1:5557"))
    with pytest.raises(ConfigurationError, match=r"needs cache\.events\.endpoint"):
        EventsConfig(replay_endpoint="tcp://127.0.0.1:5557")


def test_a_salt_is_published_as_a_digest_that_only_this_process_can_make() -> None:
    def published(*salts: str) -> list[str]:
        publisher = KVEventPublisher(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}", "kv", 9)
        context = zmq.Context()
        asker = context.socket(zmq.DEALER)
        asker.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        asker.connect(publisher.replay_endpoint)
        try:
            for salt in salts:
                keys = (f"salt:{salt}", "media:x/0:3")
                publisher.publish([BlockStored([b"a"], None, [1, 2], 2, extra_keys=[keys])])
            asker.send_multipart((b"", (0).to_bytes(8, "big")))
            found = []
            while message := asker.recv_multipart()[2]:
                assert not any(salt.encode() in message for salt in salts)
                keys = msgspec.msgpack.decode(message)[1][0]["extra_keys"][0]
                assert keys[1] == "media:x/0:3"
                found.append(keys[0])
            return found
        finally:
            asker.close(0)
            context.term()
            publisher.close()

    one, other, again = published("tenant-a", "tenant-b", "tenant-a")
    assert one == again != other
    assert published("tenant-a") != [one]
