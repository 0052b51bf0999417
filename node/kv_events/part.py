"""Publishes KV events for programs outside Tandem, in vLLM's format: over ZMQ's PUB and ROUTER, numbered. The publisher
keeps the last messages, so that a subscriber can ask for those that it missed.

A message has three frames: topic, number (eight bytes, big-endian), batch. A subscriber that has missed messages sends
a number to the replay endpoint. It gets the batch with this number and all later ones that are kept, and then the
number -1 with no batch.

Messages between Tandem's own processes go through `wire.sockets`. Subscribers speak another protocol and have no keys,
so this file shares nothing with those sockets, not even ZMQ's I/O thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec
import zmq

from tandem.base.errors import ConfigurationError
from tandem.node.wings import PartContext, ServicePart
from tandem.wire.kv_events import SALT, BlockStored, KVEvent, KVEventBatch

logger = logging.getLogger(__name__)

NAME = "cache.events"
SEND_QUEUE_FRAMES = 100_000
# If several processes of a machine get the same endpoint, each takes the next free port.
PORTS_TRIED = 64
MAX_REQUEST_BYTES = 64
LINGER_MS = 1000  # a node that ends still sends what is queued, for so long
END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """`publish` is called from one thread; another thread answers subscribers that ask for missed messages."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, kept: int) -> None:
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[bytes] = deque(maxlen=kept)
        self._salt_key = os.urandom(32)
        self._number = 0  # the next message's
        self._lock = threading.Lock()
        self._closed = False
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with contextlib.ExitStack() as undo:
            undo.callback(context.term)
            self._socket = context.socket(zmq.PUB)
            undo.callback(self._socket.close, LINGER_MS)
            self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
            self.endpoint = _bind(self._socket, endpoint)
            self.replay_endpoint = ""
            self._thread: threading.Thread | None = None
            if replay_endpoint:
                self._replay = context.socket(zmq.ROUTER)
                undo.callback(self._replay.close, 0)
                self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
                self._replay.setsockopt(zmq.SNDHWM, 2 * kept)
                self.replay_endpoint = _bind(self._replay, replay_endpoint)
                self._stop = context.socket(zmq.PAIR)
                undo.callback(self._stop.close, 0)
                self._stop.bind(f"inproc://stop-publisher-{id(self)}")
                self._stopper = context.socket(zmq.PAIR)
                undo.callback(self._stopper.close, 0)
                self._stopper.connect(f"inproc://stop-publisher-{id(self)}")
                self._thread = threading.Thread(target=self._answer, name=f"{NAME}-replay", daemon=True)
                self._thread.start()
            self._undo = undo.pop_all()
        logger.info(
            "%s: published at %s, asked for again at %s", NAME, self.endpoint, self.replay_endpoint or "no place"
        )

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Never blocks. A slow subscriber loses the messages that do not fit into its queue, and sees the gap in the
        numbers."""
        shown = [self._without_salt(event) for event in events]
        message = self._encoder.encode(KVEventBatch(time.time(), shown))
        with self._lock:
            number = self._number
            self._number += 1
            self._kept.append(message)
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), message), zmq.NOBLOCK)

    def _without_salt(self, event: KVEvent) -> KVEvent:
        """Replaces salts by digests, because a salt is all that keeps others from a prefix. The key is this process's own, so no
        subscriber can try salts out, and equal salts have equal digests for as long as it lives."""
        if not isinstance(event, BlockStored) or not event.extra_keys:
            return event
        if not any(key.startswith(SALT) for keys in event.extra_keys if keys for key in keys):
            return event
        shown = [keys and tuple(map(self._shown, keys)) for keys in event.extra_keys]
        return msgspec.structs.replace(event, extra_keys=shown)

    def _shown(self, key: str) -> str:
        if not key.startswith(SALT):
            return key
        salt = key.removeprefix(SALT).encode("utf-8", "surrogatepass")
        return SALT + hashlib.blake2b(salt, digest_size=16, key=self._salt_key).hexdigest()

    def _answer(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while self._stop not in dict(poller.poll()):
            try:
                self._answer_one(self._replay.recv_multipart())
            except zmq.ZMQError as error:
                logger.warning("a subscriber that asked for what it missed got no answer: %s", error)

    def _answer_one(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        asker, wanted = frames[0], int.from_bytes(frames[2], "big")
        with self._lock:
            first = self._number - len(self._kept)
            kept = list(islice(self._kept, min(max(0, wanted - first), len(self._kept)), None))
            number = self._number - len(kept)
        for message in kept:
            self._replay.send_multipart((asker, b"", number.to_bytes(8, "big"), message), zmq.NOBLOCK)
            number += 1
        self._replay.send_multipart((asker, b"", END, b""), zmq.NOBLOCK)

    def close(self) -> None:
        """Sends what is queued first. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._stopper.send(b"")
            self._thread.join(5)
        self._undo.close()


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    address, _, port = endpoint.rpartition(":")
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    for further in range(PORTS_TRIED):
        try:
            socket.bind(f"{address}:{int(port) + further}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise ConfigurationError(f"{NAME}: cannot publish at {endpoint}: {error}") from error
        else:
            return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    raise ConfigurationError(
        f"{NAME}: cannot publish at {endpoint}: this port and the {PORTS_TRIED - 1} after it are taken"
    )


def make(context: PartContext) -> ServicePart | None:
    events = context.config.engine.cache.events
    if not context.engine.caches_prefixes or not events.endpoint:
        return None
    return KVEventsPart(KVEventPublisher(events.endpoint, events.replay_endpoint, events.topic, events.buffer_steps))


class KVEventsPart(ServicePart):
    def __init__(self, publisher: KVEventPublisher) -> None:
        self.publish = publisher.publish
        self._publisher = publisher

    def stop(self) -> None:
        self._publisher.close()
