"""Recent responses, and those that are still being written, in this router's memory, which is bounded.

The store knows its size at every moment: a response reports how much it grew or shrank. So keeping one response
costs the event loop the same however many others there are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tandem.router.responses.responses_request import InputItem
from tandem.wire.errors import RequestError, TandemError, Unavailable


class ResponseNotFound(RequestError):
    code = "response_not_found"
    http_status = 404

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"the response {response_id[:100]!r} is not here: it was not stored, was made by another router and not in the "
            "background, or has made room for newer ones"
        )


class StoreFull(Unavailable):
    code = "overloaded"


class StoredResponse:
    """One response. `events` are its stream's, each at its number. They are kept while clients follow it; a
    background response keeps them after its end, too."""

    def __init__(
        self, body: dict[str, Any], owner: str, items: list[InputItem], *, keeps_events: bool
    ) -> None:
        self.body = body
        self.owner = owner
        self.items = items  # the conversation before its answer
        self.keeps_events = keeps_events
        self.events: list[bytes] = []
        self._items_size = len(msgspec.json.encode(items))
        self._events_size = 0
        self.size = self._items_size + len(msgspec.json.encode(body))
        self.store: ResponseStore | None = None  # the store that keeps it
        self.ended = False
        self.error: TandemError | None = None
        self.task: asyncio.Task[None] | None = None
        # set when everything was read that the node had when this router began to read
        self.caught_up = asyncio.Event()
        self._changed = asyncio.Event()
        self._followers = 0

    @property
    def id(self) -> str:
        found: str = self.body["id"]
        return found

    def add(self, events: list[bytes]) -> None:
        if events:
            self.events += events
            grown = sum(map(len, events))
            self._events_size += grown
            self._resize(self.size + grown)
            self._wake()

    def end(self, error: TandemError | None = None) -> None:
        self.ended, self.error = True, error
        self.caught_up.set()
        self._wake()
        if self.store is not None:
            self.store.on_ended(self)
        self._forget_events()

    def _resize(self, size: int) -> None:
        grown, self.size = size - self.size, size
        if self.store is not None:
            self.store.on_resized(grown)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yields the events after number `after`, up to the response's end. The request's own deadlines bound
        the wait."""
        at = after + 1
        self._followers += 1
        try:
            while True:
                changed = self._changed
                if at < len(self.events):
                    news = b"".join(self.events[at:])
                    at = len(self.events)
                    yield news
                elif self.ended:
                    return
                else:
                    await changed.wait()
        finally:
            self._followers -= 1
            self._forget_events()

    def output_items(self) -> list[InputItem]:
        """Returns the answer's items as the next request would send them."""
        return msgspec.convert(self.body["output"], list[InputItem])

    def _forget_events(self) -> None:
        """Drops the events of an ended response that is not in the background, once all followers have read
        them. Its body is kept."""
        if self.ended and not self.keeps_events and self._followers == 0:
            self.events, self._events_size = [], 0
        if self.ended:
            self._resize(self._items_size + len(msgspec.json.encode(self.body)) + self._events_size)


class ResponseStore:
    """Keeps responses. Those that have ended make room for new ones, the least recently used first. A running
    response is never dropped; a new one is refused instead."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._running: dict[str, StoredResponse] = {}
        self._ended: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0

    def add(self, response: StoredResponse) -> None:
        self._make_room(response.size)
        if self.size + response.size > self._most_bytes:
            raise StoreFull(
                "the responses that are being written take up what this router keeps of them "
                f"({self._most_bytes} bytes); send this one again later, or with store: false"
            )
        if (former := self._find(response.id)) is not None:
            self.drop(former)
        (self._ended if response.ended else self._running)[response.id] = response
        response.store = self
        self.size += response.size

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Finds a response of this key; other keys' responses are not found."""
        found = self._find(response_id)
        if found is None or found.owner != owner:
            return None
        if response_id in self._ended:
            self._ended.move_to_end(response_id)
        return found

    def _find(self, response_id: str) -> StoredResponse | None:
        return self._running.get(response_id) or self._ended.get(response_id)

    def drop(self, response: StoredResponse) -> None:
        """Forgets a response. Does nothing if it is not here."""
        if response.store is self:
            response.store = None
            self._running.pop(response.id, None)
            self._ended.pop(response.id, None)
            self.size -= response.size

    def settle(self) -> None:
        """Makes room after a response has ended or grown."""
        self._make_room(0)

    def _make_room(self, wanted: int) -> None:
        while self.size + wanted > self._most_bytes and self._ended:
            self.drop(next(iter(self._ended.values())))

    def on_resized(self, grown: int) -> None:
        self.size += grown

    def on_ended(self, response: StoredResponse) -> None:
        self._running.pop(response.id, None)
        self._ended[response.id] = response
