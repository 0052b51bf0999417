"""Publishes the events of this node's KV cache, if `cache.events` says where."""

from __future__ import annotations

from tandem.node.kv_events.publisher import KVEventPublisher
from tandem.node.wings import PartContext, ServicePart


def make(context: PartContext) -> ServicePart | None:
    events = context.config.engine.cache.events
    if not context.engine.caches_prefixes or not events.endpoint:
        return None
    return KVEventsPart(
        KVEventPublisher(events.endpoint, events.replay_endpoint, events.topic, events.buffer_steps)
    )


class KVEventsPart(ServicePart):
    def __init__(self, publisher: KVEventPublisher) -> None:
        self.publish = publisher.publish
        self._publisher = publisher

    def stop(self) -> None:
        self._publisher.close()
