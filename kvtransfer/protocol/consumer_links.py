"""The consumers that a producer knows: one link for each incarnation that said Hello and fitted."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator

import msgspec

from tandem.kvtransfer.protocol.cache_map import Mapping, PoolGeometry
from tandem.kvtransfer.protocol.identity import BoundedMemory, Clock, PeerKey, key_of
from tandem.kvtransfer.protocol.pace import LinkMeter
from tandem.kvtransfer.protocol.settings import ProtocolSettings
from tandem.kvtransfer.protocol.side import Forget
from tandem.kvtransfer.protocol.transport import RemoteId, Transport
from tandem.wire.errors import TransferError
from tandem.wire.handoff import Hello, RefusalCode

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class ConsumerLink:
    key: PeerKey
    endpoint: str
    hello: Hello
    mapping: Mapping  # from our blocks to its
    remote: RemoteId | None  # None with pull: the consumer comes to us
    last_heard: float
    meter: LinkMeter
    pace_told_at: float = -math.inf
    has_failed: bool = False  # what is in flight through it is stopped by disconnecting


class Rejection(msgspec.Struct, frozen=True):
    code: RefusalCode
    reason: str


class ConsumerLinks:
    """A consumer whose memory became reachable in another way says so in another Hello. What is registered from then on
    goes through the new link; what was registered before goes on through the earlier one."""

    def __init__(
        self,
        geometry: PoolGeometry,
        transport: Transport | None,
        settings: ProtocolSettings,
        clock: Clock,
        *,
        forget: Forget,
    ) -> None:
        self._geometry = geometry
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._forget = forget
        self._links: dict[PeerKey, ConsumerLink] = {}
        # Links for which nothing new is begun, while transfers that have begun may still need them.
        self._leaving: list[ConsumerLink] = []
        self._ended: BoundedMemory[bool] = BoundedMemory(settings.max_remembered, settings.remember_s, clock)

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
        if self.has_ended(key):
            return Rejection(RefusalCode.HANDSHAKE_FAILED, "this incarnation is known to have ended")
        link = self.hear(key)
        if link is not None and link.hello.memory == hello.memory:
            return None
        mapping = self._geometry.mapping_to(hello.fingerprint, hello.memory)
        if not isinstance(mapping, Mapping):
            logger.error("%s cannot receive KV from here: %s", key.node_id, mapping)
            return Rejection(RefusalCode.INCOMPATIBLE, mapping)
        if any(leaving.has_failed and leaving.key == key for leaving in self._leaving):
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
        if link is not None:
            self._leave(link)
        meter = LinkMeter(self._settings.pace_s)
        self._links[key] = ConsumerLink(
            key, hello.envelope.reply_to, hello, mapping, remote, self._clock(), meter
        )
        return None

    def mark_ended(self, key: PeerKey) -> None:
        """It is certain that this incarnation does not run any more."""
        self._ended.add(_name(key), True)
        link = self._links.get(key)
        if link is not None:
            self._forget(link.endpoint)
            self.fail(link)

    def has_ended(self, key: PeerKey) -> bool:
        return self._ended.get(_name(key)) is not None

    def fail(self, link: ConsumerLink) -> None:
        """Nothing more goes through this link, and what does not end by itself is stopped."""
        link.has_failed = True
        if link not in self._leaving:
            self._leave(link)

    def leave_all(self) -> None:
        for link in self:
            self._leave(link)

    def _leave(self, link: ConsumerLink) -> None:
        if self._links.get(link.key) is link:
            del self._links[link.key]
        if link.remote is not None:
            self._leaving.append(link)

    def drop_unused(self, greeted: PeerKey, in_use: Callable[[ConsumerLink], bool]) -> None:
        """Links with consumers that were not heard of for long, or with another incarnation of the one that has greeted
        us. A node that goes for good says nothing of it, and a Hello does not prove that the other incarnation has
        ended: what still goes there goes on until its lease ends."""
        limit = self._clock() - self._settings.keep_link_s
        for link in self:
            other = link.key.node_id == greeted.node_id and link.key != greeted
            if (other or link.last_heard < limit) and not in_use(link):
                del self._links[link.key]
                if other:
                    self._forget(link.endpoint)
                self._disconnect(link)

    def is_leaving(self, link: ConsumerLink) -> bool:
        return link in self._leaving

    def close_idle(self, in_use: Callable[[ConsumerLink], bool]) -> None:
        """Disconnect links that are over and that no transfer needs any more."""
        for link in list(self._leaving):
            if not in_use(link):
                self._leaving.remove(link)
                self._disconnect(link)

    def _disconnect(self, link: ConsumerLink) -> None:
        if self._transport is not None and link.remote is not None:
            self._transport.disconnect(link.remote)

    @property
    def has_leaving(self) -> bool:
        return bool(self._leaving)


def _name(key: PeerKey) -> str:
    return f"{key.epoch}/{key.node_id}"
