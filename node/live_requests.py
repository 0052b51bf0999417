"""A node's requests between their Submit and their end: who owns each, how far it was reported, when it is overdue."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator

from tandem.wire.requests import Submit

_SPARE_DEADLINES = 100


@dataclasses.dataclass(slots=True)
class LiveRequest:
    submit: Submit
    deadline: float
    reported: int  # how many output tokens its router has been told of, or told us of


class LiveRequests:
    """Used by the step thread alone. Invariant: each live request's deadline is in the heap."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    def get(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def of_router(self, reply_to: str) -> list[LiveRequest]:
        return [live for live in self._live.values() if live.submit.reply_to == reply_to]

    def is_owner(self, request_id: str, reply_to: str) -> bool:
        live = self._live.get(request_id)
        return live is not None and live.submit.reply_to == reply_to

    def begin(self, submit: Submit, now: float) -> None:
        deadline = now + submit.timeout_s
        self._live[submit.request_id] = LiveRequest(submit, deadline, len(submit.output_token_ids))
        heapq.heappush(self._deadlines, (deadline, submit.request_id))
        # A request that ends leaves its deadline in the heap, half an hour away.
        if len(self._deadlines) > 2 * len(self._live) + _SPARE_DEADLINES:
            self._deadlines = [(live.deadline, id) for id, live in self._live.items()]
            heapq.heapify(self._deadlines)

    def end(self, request_id: str) -> LiveRequest | None:
        return self._live.pop(request_id, None)

    def clear(self) -> None:
        self._live.clear()

    def overdue(self, now: float) -> Iterator[LiveRequest]:
        """Each once. They are still live."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            live = self._live.get(request_id)
            if live is not None and live.deadline == deadline:
                yield live

    def seconds_until_due(self, now: float) -> float | None:
        while self._deadlines:
            deadline, request_id = self._deadlines[0]
            live = self._live.get(request_id)
            if live is not None and live.deadline == deadline:
                return deadline - now
            heapq.heappop(self._deadlines)
        return None
