"""Which transfers a producer knows: open ones, and how those ended of which a late message may still speak."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.kvtransfer.protocol.answers import Ending
from tandem.kvtransfer.protocol.handshakes import ConsumerLink
from tandem.kvtransfer.protocol.identity import Clock, PeerKey, Remembered
from tandem.kvtransfer.protocol.sending import Sending
from tandem.kvtransfer.protocol.settings import Settings
from tandem.kvtransfer.protocol.statistics import Recorder


class Ledger:
    def __init__(self, settings: Settings, clock: Clock, recorder: Recorder) -> None:
        self._settings = settings
        self._clock = clock
        self._recorder = recorder
        self._by_transfer: dict[str, Sending] = {}
        self._by_request: dict[str, Sending] = {}
        self.in_line: dict[str, str] = {}  # transfers whose request has no blocks yet: its id
        self._endings: Remembered[Ending] = Remembered(settings.max_remembered, settings.remember_s, clock)

    def __iter__(self) -> Iterator[Sending]:
        return iter(list(self._by_transfer.values()))

    @property
    def is_empty(self) -> bool:
        return not self._by_transfer

    def get(self, transfer_id: str) -> Sending | None:
        return self._by_transfer.get(transfer_id)

    def of_request(self, request_id: str) -> Sending | None:
        return self._by_request.get(request_id)

    def to(self, key: PeerKey) -> list[Sending]:
        return [
            sending
            for sending in self._by_transfer.values()
            if sending.destination is not None and sending.destination.consumer == key
        ]

    def through(self, link: ConsumerLink) -> list[Sending]:
        return [
            sending
            for sending in self._by_transfer.values()
            if sending.destination is not None and sending.destination.link is link
        ]

    def open(self, transfer_id: str) -> Sending:
        sending = Sending(transfer_id, self._clock())
        self._by_transfer[transfer_id] = sending
        self._recorder.began()
        return sending

    def bind(self, request_id: str, sending: Sending) -> None:
        sending.request_id = request_id
        self._by_request[request_id] = sending

    def forget(self, sending: Sending) -> None:
        self._by_transfer.pop(sending.transfer_id, None)
        if sending.request_id is not None:
            self._by_request.pop(sending.request_id, None)

    def has_room(self, places: int) -> bool:
        """Whether one more registration, of a table with so many places, may wait here for its request."""
        early = [sending for sending in self._by_transfer.values() if sending.source is None]
        waiting = sum(
            len(ids)
            for sending in early
            if sending.destination is not None
            for ids in sending.destination.block_ids
        )
        settings = self._settings
        return len(early) < settings.max_early_registrations and waiting + places <= settings.max_early_places

    def ended(self, transfer_id: str, ending: Ending) -> None:
        self._endings.add(transfer_id, ending)

    def ending_of(self, transfer_id: str) -> Ending | None:
        return self._endings.get(transfer_id)
