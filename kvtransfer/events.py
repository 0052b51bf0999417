"""KV events for programs that are not Tandem's, as vLLM publishes them: over ZMQ, numbered, and kept for a while to be asked for again.

A message has three frames: topic, number (eight bytes, big-endian), batch. A subscriber that has missed some sends a number to the replay
endpoint; it gets the batch with this number and all later ones that are kept, and then the number -1 with no batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tandem.wire.kv_events import KVEvent, KVEventBatch
from tandem.wire.publishing import Publisher


class KVEventPublisher:
    """`publish` is called from one thread."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, kept: int) -> None:
        self._publisher = Publisher(endpoint, replay_endpoint, topic.encode(), kept, name="cache.events")
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def endpoint(self) -> str:
        return self._publisher.endpoint

    @property
    def replay_endpoint(self) -> str:
        return self._publisher.replay_endpoint

    def publish(self, events: Sequence[KVEvent]) -> None:
        self._publisher.publish(self._encoder.encode(KVEventBatch(time.time(), list(events))))

    def close(self) -> None:
        self._publisher.close()
