"""The consumers that a producer knows: one link for each incarnation that said Hello and fitted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec

from tandem.kvtransfer.protocol.geometry import PoolGeometry
from tandem.kvtransfer.protocol.identity import Clock, PeerKey, Remembered, key_of
from tandem.kvtransfer.protocol.mapping import Mapping
from tandem.kvtransfer.protocol.settings import Settings
from tandem.kvtransfer.protocol.side import Forget
from tandem.kvtransfer.protocol.transport import RemoteId, Transport
from tandem.wire.errors import TransferError
from tandem.wire.handoff import Hello, RefusalCode

logger = logging.getLogger(__name__)


class ConsumerLink(msgspec.Struct):
    key: PeerKey
    endpoint: str
    hello: Hello
    mapping: Mapping  # from our blocks to its
    remote: RemoteId | None  # None with pull: the consumer comes to us
    last_heard: float


class Rejection(msgspec.Struct, frozen=True):
    code: RefusalCode
    reason: str


class Handshakes:
    """`lost` is called for a link that a Hello replaced, after it has been removed."""

    def __init__(
        self,
        geometry: PoolGeometry,
        transport: Transport | None,
        settings: Settings,
        clock: Clock,
        *,
        forget: Forget,
        lost: Callable[[PeerKey, str], None],
    ) -> None:
        self._geometry = geometry
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._forget = forget
        self._lost = lost
        self._links: dict[PeerKey, ConsumerLink] = {}
        # Links that are over, while writes through them may still be in flight.
        self._leaving: dict[PeerKey, ConsumerLink] = {}
        self._dead: Remembered[bool] = Remembered(settings.max_remembered, settings.remember_s, clock)

    def __iter__(self) -> Iterator[ConsumerLink]:
        return iter(list(self._links.values()))

    def get(self, key: PeerKey) -> ConsumerLink | None:
        return self._links.get(key)

    def hear(self, key: PeerKey) -> ConsumerLink | None:
        link = self._links.get(key)
        if link is not None:
            link.last_heard = self._clock()
        return link

    def welcome(self, hello: Hello) -> Rejection | None:
        """Make or confirm the link; what is returned instead says why there is none."""
        key = key_of(hello.envelope)
        if self.is_dead(key):
            return Rejection(RefusalCode.HANDSHAKE_FAILED, "this incarnation is known to have ended")
        link = self.hear(key)
        if link is not None and link.hello.memory == hello.memory:
            return None
        mapping = self._geometry.mapping_to(hello.fingerprint, hello.memory)
        if not isinstance(mapping, Mapping):
            logger.error("%s cannot receive KV from here: %s", key.node_id, mapping)
            return Rejection(RefusalCode.INCOMPATIBLE, mapping)
        for other in list(self._links):
            if other.node_id == key.node_id and other.epoch != key.epoch:
                self.mark_dead(other)
                self._lost(other, "the node was started anew")
        if link is not None or key in self._leaving:
            if link is not None:
                self.leave(key)
                self._lost(key, "it described its memory anew")
            return Rejection(
                RefusalCode.HANDSHAKE_FAILED, "an earlier link with this node is still being closed"
            )
        remote: RemoteId | None = None
        if self._transport is not None:
            try:
                remote = self._transport.connect(hello.memory)
            except TransferError as error:
                logger.error("cannot reach the KV memory of %s: %s", key.node_id, error)
                return Rejection(RefusalCode.HANDSHAKE_FAILED, str(error))
        self._links[key] = ConsumerLink(key, hello.envelope.reply_to, hello, mapping, remote, self._clock())
        return None

    def mark_dead(self, key: PeerKey) -> None:
        """It is certain that this incarnation does not run any more."""
        self._dead.add(_name(key), True)
        link = self._links.get(key)
        if link is not None:
            self._forget(link.endpoint)
        self.leave(key)

    def is_dead(self, key: PeerKey) -> bool:
        return self._dead.get(_name(key)) is not None

    def leave(self, key: PeerKey) -> None:
        link = self._links.pop(key, None)
        if link is not None and link.remote is not None:
            self._leaving[key] = link

    def drop_unused(self, in_use: Callable[[PeerKey], bool]) -> None:
        """Links with consumers that were not heard of for long. A node that goes for good says nothing of it."""
        limit = self._clock() - self._settings.keep_link_s
        for key, link in list(self._links.items()):
            if link.last_heard < limit and not in_use(key):
                del self._links[key]
                self._disconnect(link)

    def is_leaving(self, key: PeerKey) -> bool:
        return key in self._leaving

    def close_idle(self, in_use: Callable[[PeerKey], bool]) -> None:
        """Disconnect links that are over and through which nothing moves any more."""
        for key, link in list(self._leaving.items()):
            if not in_use(key):
                del self._leaving[key]
                self._disconnect(link)

    def _disconnect(self, link: ConsumerLink) -> None:
        if self._transport is not None and link.remote is not None:
            self._transport.disconnect(link.remote)

    @property
    def has_leaving(self) -> bool:
        return bool(self._leaving)


def _name(key: PeerKey) -> str:
    return f"{key.epoch}/{key.node_id}"
