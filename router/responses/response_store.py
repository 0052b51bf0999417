"""Answers that were asked for lately, and those that are still being written. In this router's memory, and bounded."""

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
    """`events` are those of its stream, each at its number. They are kept for followers, and to the end where it
    was asked for in the background."""

    def __init__(
        self, body: dict[str, Any], owner: str, items: list[InputItem], *, keeps_events: bool
    ) -> None:
        self.body = body
        self.owner = owner
        self.items = items  # the conversation up to its answer
        self.keeps_events = keeps_events
        self.events: list[bytes] = []
        self.size = len(msgspec.json.encode(items)) + len(msgspec.json.encode(body))
        self.ended = False
        self.error: TandemError | None = None
        self.task: asyncio.Task[None] | None = None
        self.caught_up = asyncio.Event()  # what its node had when this router began to read it has been read
        self._changed = asyncio.Event()
        self._followers = 0

    @property
    def id(self) -> str:
        found: str = self.body["id"]
        return found

    def add(self, events: list[bytes]) -> None:
        if events:
            self.events += events
            self.size += sum(map(len, events))
            self._wake()

    def end(self, error: TandemError | None = None) -> None:
        self.ended, self.error = True, error
        self.caught_up.set()
        self._wake()
        self._forget_events()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Events with a number above `after`, to the end. The request's own deadlines bound the wait."""
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
        """As the next request would send them back."""
        return msgspec.convert(self.body["output"], list[InputItem])

    def _forget_events(self) -> None:
        """Its answer is kept whole. Who follows it has read them all."""
        if self.ended and not self.keeps_events and self._followers == 0:
            self.events = []
            self.size = len(msgspec.json.encode(self.items)) + len(msgspec.json.encode(self.body))


class ResponseStore:
    """The oldest that have ended make room. What still runs is never dropped: a new one is refused instead."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def add(self, response: StoredResponse) -> None:
        self._make_room()
        if sum(one.size for one in self._kept.values()) + response.size > self._most_bytes:
            raise StoreFull(
                "the responses that are being written take up what this router keeps of them "
                f"({self._most_bytes} bytes); send this one again later, or with store: false"
            )
        self._kept[response.id] = response

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Another key's response is not found either."""
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            return None
        self._kept.move_to_end(response_id)
        return found

    def drop(self, response: StoredResponse) -> None:
        self._kept.pop(response.id, None)

    def _make_room(self) -> None:
        size = sum(one.size for one in self._kept.values())
        for one in list(self._kept.values()):
            if size <= self._most_bytes:
                return
            if one.ended:
                size -= one.size
                self.drop(one)

    def settle(self) -> None:
        """One has ended or has grown."""
        self._make_room()
