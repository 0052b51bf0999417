"""Recent responses, and those that are still being written, in this router's memory, which is bounded.

The store knows its size at every moment: a response reports how much it grew or shrank. So keeping one response
costs the event loop the same however many others there are.

Keys share it: one key's responses that are being written leave room for others' (`shares`), and where room is
needed, the key that keeps most gives up its oldest.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tandem.api.openai.served_model import NotHere
from tandem.api.responses.responses_request import InputItem
from tandem.base.errors import TandemError, Unavailable
from tandem.base.shares import Shares

# Bytes that Python needs, measured: for all that belongs to a response besides its texts, and for an event.
RESPONSE_BYTES = 4 << 10
EVENT_BYTES = 40


class ResponseNotFound(NotHere):
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"the response {response_id[:100]!r} is not here: it was not stored, was made by another router and not in the "
            "background, or has made room for newer ones"
        )


class StoreFull(Unavailable):
    code = "overloaded"


class StoredResponse:
    """One response. `events` are its stream's, in order. A background response keeps them all, each at its number, for any client
    that follows it; another one has one follower, and keeps what that has not read."""

    def __init__(self, body: dict[str, Any], owner: str, items: list[InputItem], *, keeps_events: bool) -> None:
        self.body = body
        self.owner = owner
        # The conversation before its answer, as JSON: hundreds of small items would take ten times as much.
        self._items = msgspec.json.encode(items)
        self.keeps_events = keeps_events
        self.events: list[bytes] = []
        self._first = 0  # the number of the first of them
        self._events_size = 0
        self.size = RESPONSE_BYTES + len(self._items) + len(msgspec.json.encode(body))
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

    @property
    def items(self) -> list[InputItem]:
        return msgspec.json.decode(self._items, type=list[InputItem])

    def add(self, events: list[bytes]) -> None:
        if events:
            self.events += events
            grown = sum(map(len, events)) + EVENT_BYTES * len(events)
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
            self.store.on_resized(self, grown)

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
                at = max(at, self._first)
                if at < self._first + len(self.events):
                    news = b"".join(self.events[at - self._first :])
                    at = self._first + len(self.events)
                    self._drop_read()
                    yield news
                elif self.ended:
                    return
                else:
                    await changed.wait()
        finally:
            self._followers -= 1
            self._forget_events()

    def _drop_read(self) -> None:
        if not self.keeps_events:
            self._first += len(self.events)
            self.events.clear()
            read, self._events_size = self._events_size, 0
            self._resize(self.size - read)

    def output_items(self) -> list[InputItem]:
        """Returns the answer's items as the next request would send them."""
        return msgspec.convert(self.body["output"], list[InputItem])

    def _forget_events(self) -> None:
        """Drops the events of an ended response that is not in the background, once all followers have read
        them. Its body is kept."""
        if self.ended and not self.keeps_events and self._followers == 0:
            self.events, self._events_size = [], 0
        if self.ended:
            self._resize(RESPONSE_BYTES + len(self._items) + len(msgspec.json.encode(self.body)) + self._events_size)


class ResponseStore:
    """Keeps responses. Those that have ended make room for new ones, the least recently used first. A running
    response is never dropped; a new one is refused instead."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._running: dict[str, StoredResponse] = {}
        self._written = Shares(most_bytes, alone=most_bytes // 2)  # bytes of these
        # Of each key, the least recently used first, and their bytes.
        self._ended: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._kept: Counter[str] = Counter()

    @property
    def size(self) -> int:
        return self._written.held + self._kept.total()

    def add(self, response: StoredResponse) -> None:
        owner, size = response.owner, response.size
        if not response.ended and not self._written.fits(owner, size):
            raise StoreFull(
                f"the responses that are being written take up {self._written.part(size)} what this router keeps of them "
                f"({self._most_bytes} bytes); send this one again later, or with store: false"
            )
        self._make_room(size)
        if (former := self.find(response.id, owner)) is not None:
            self.drop(former)
        if response.ended:
            self._keep(response)
        else:
            self._running[response.id] = response
            self._written.take(owner, size)
        response.store = self

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Finds a response of this key; other keys' responses are not found."""
        running = self._running.get(response_id)
        if running is not None:
            return running if running.owner == owner else None
        own = self._ended.get(owner)
        if own is None or response_id not in own:
            return None
        own.move_to_end(response_id)
        return own[response_id]

    def drop(self, response: StoredResponse) -> None:
        """Forgets a response. Does nothing if it is not here."""
        if response.store is not self:
            return
        response.store = None
        if self._running.pop(response.id, None) is not None:
            self._written.take(response.owner, -response.size)
            return
        own = self._ended[response.owner]
        del own[response.id]
        self._kept[response.owner] -= response.size
        if not own:
            del self._ended[response.owner], self._kept[response.owner]

    def settle(self) -> None:
        """Makes room after a response has ended or grown."""
        self._make_room(0)

    def _make_room(self, wanted: int) -> None:
        while self.size + wanted > self._most_bytes and self._ended:
            most = max(self._ended, key=self._kept.__getitem__)
            self.drop(next(iter(self._ended[most].values())))

    def on_resized(self, response: StoredResponse, grown: int) -> None:
        if response.id in self._running:
            self._written.take(response.owner, grown)
        else:
            self._kept[response.owner] += grown

    def on_ended(self, response: StoredResponse) -> None:
        if self._running.pop(response.id, None) is not None:
            self._written.take(response.owner, -response.size)
            self._keep(response)

    def _keep(self, response: StoredResponse) -> None:
        self._ended.setdefault(response.owner, OrderedDict())[response.id] = response
        self._kept[response.owner] += response.size
