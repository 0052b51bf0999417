"""Responses in the other router processes on the port: found, copied and forgotten there."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.api.responses.response_store import ResponseStore, StoredResponse
from tandem.api.responses.responses_request import InputItem
from tandem.router.siblings import Siblings


class ResponseQuestion(msgspec.Struct, frozen=True):
    response_id: str
    owner: str


class FoundResponse(msgspec.Struct, frozen=True):
    body: dict[str, Any] | None = None  # None: not found
    items: list[InputItem] = []
    events: list[bytes] = []
    keeps_events: bool = False
    ended: bool = False


class SharedResponses:
    """Asks the siblings for responses, and answers them from this process's store."""

    def __init__(self, siblings: Siblings, store: ResponseStore) -> None:
        self._siblings = siblings
        self._store = store
        siblings.answers.update(response=self._find, forget=self._forget)

    async def _find(self, body: bytes) -> FoundResponse:
        asked = msgspec.msgpack.decode(body, type=ResponseQuestion)
        found = self._store.find(asked.response_id, asked.owner)
        if found is None or (found.error is not None and found.body["status"] in ("queued", "in_progress")):
            return FoundResponse()
        return FoundResponse(found.body, found.items, found.events, found.keeps_events, found.ended)

    async def _forget(self, body: bytes) -> bool:
        asked = msgspec.msgpack.decode(body, type=ResponseQuestion)
        found = self._store.find(asked.response_id, asked.owner)
        if found is not None:
            if found.task is not None:
                found.task.cancel()
            self._store.drop(found)
        return found is not None

    async def copy_of(self, response_id: str, owner: str) -> StoredResponse | None:
        """Returns a copy of a response that a sibling has, or None. A background response that is still being
        written is not copied: it is found on its node."""
        told, _ = await self._siblings.ask("response", FoundResponse, ResponseQuestion(response_id, owner))
        for found in told.values():
            if found.body is not None and (found.ended or not found.keeps_events):
                copy = StoredResponse(found.body, owner, found.items, keeps_events=found.keeps_events)
                copy.events, copy.ended = found.events, found.ended
                return copy
        return None

    async def forget(self, response_id: str, owner: str) -> None:
        await self._siblings.ask("forget", bool, ResponseQuestion(response_id, owner))
