"""Transfers that this node will not take: their producers should not wait for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from tandem.kvtransfer.protocol.identity import Clock, Identity
from tandem.kvtransfer.protocol.settings import Settings
from tandem.wire.handoff import CancelTransfer
from tandem.wire.nodes import PeerAddress


@dataclasses.dataclass(slots=True)
class _Declined:
    peer: PeerAddress
    until: float
    asked_at: float


class Declined:
    """Tells each producer until it answers, for a bounded time: if it never hears, its own lease ends the wait."""

    def __init__(
        self, me: Identity, settings: Settings, send: Callable[[str, msgspec.Struct], None], clock: Clock
    ) -> None:
        self._me = me
        self._settings = settings
        self._send = send
        self._clock = clock
        self._transfers: dict[str, _Declined] = {}

    @property
    def is_empty(self) -> bool:
        return not self._transfers

    def add(self, transfer_id: str, peer: PeerAddress) -> None:
        now = self._clock()
        self._transfers[transfer_id] = _Declined(peer, now + self._settings.silent_s, now)
        self._ask(transfer_id, peer)

    def closed(self, transfer_id: str) -> None:
        self._transfers.pop(transfer_id, None)

    def tick(self) -> None:
        now = self._clock()
        for transfer_id, declined in list(self._transfers.items()):
            if now >= declined.until:
                del self._transfers[transfer_id]
            elif now >= declined.asked_at + self._settings.retry_s:
                declined.asked_at = now
                self._ask(transfer_id, declined.peer)

    def _ask(self, transfer_id: str, peer: PeerAddress) -> None:
        self._send(peer.endpoint, CancelTransfer(self._me.envelope(peer.epoch), transfer_id))
