"""The policy of a scheduler that pins turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem.engine.request import Request
from tandem.engine.scheduling.queue import FirstComeFirstServed, RequestQueue, SortKey


class PinnedJobs(Protocol):
    def has(self, job_id: str | None) -> bool: ...


class Continuum(FirstComeFirstServed):
    """Requests of jobs with a pin are admitted first, because their KV is here, and preempted last. Otherwise first come, first
    served."""

    def __init__(self, pins: PinnedJobs) -> None:
        super().__init__()
        self._pins = pins

    def _ranked(self, key: SortKey, request: Request) -> SortKey:
        return (not self._pins.has(request.facts.job_id), *key)

    def key_on_arrival(self, request: Request) -> SortKey:
        return self._ranked(super().key_on_arrival(request), request)

    def key_on_preemption(self, request: Request) -> SortKey:
        return self._ranked(super().key_on_preemption(request), request)

    def key_on_skip(self, request: Request) -> SortKey:
        return self._ranked(super().key_on_skip(request), request)

    def key_again(self, key: SortKey, request: Request) -> SortKey:
        return self._ranked(key[1:], request)

    def choose(self, waiting: RequestQueue, skipped: RequestQueue) -> RequestQueue | None:
        first, passed_over = waiting.peek(), skipped.peek()
        if first is not None and passed_over is not None:
            if self._pins.has(first.facts.job_id) and not self._pins.has(passed_over.facts.job_id):
                return waiting
            return skipped
        return super().choose(waiting, skipped)

    def victim(self, running: Sequence[Request]) -> int:
        for index in range(len(running) - 1, -1, -1):
            if not self._pins.has(running[index].facts.job_id):
                return index
        return super().victim(running)
