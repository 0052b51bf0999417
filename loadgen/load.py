"""Sends a workload to a server and records every request's timeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tandem.loadgen.api import Api, Message, Prompt
from tandem.loadgen.timeline import Timeline
from tandem.loadgen.workload import Session
from tandem.wire.errors import ConfigurationError


class LoadStream:
    """One stream of sessions under one label. Several may run side by side on one event loop.

    With `arrivals`, each session is sent at its time, or later if `concurrency` sessions are already running. Without
    `arrivals`, the next session is sent as soon as one of `concurrency` users is free.
    """

    def __init__(
        self,
        label: str,
        api: Api,
        sessions: Sequence[Session],
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        trace: str = "",
    ) -> None:
        """`trace`: the id of the request in the middle, which the server is asked to trace."""
        if concurrency is not None and concurrency < 1:
            raise ConfigurationError(f"the concurrency must be at least 1, not {concurrency}")
        self.label = label
        self.total = sum(len(session.turns) for session in sessions)
        self.timelines: list[Timeline] = []  # of the requests that have ended
        self.active: set[Timeline] = set()
        self._api = api
        self._sessions = sessions
        self._arrivals = arrivals
        self._traced = sessions[len(sessions) // 2] if sessions and trace else None
        self._trace = trace
        self._slots = asyncio.Semaphore(concurrency) if concurrency is not None else None
        self._stopping = asyncio.Event()
        self._began = self._ended = 0.0

    @property
    def began_at(self) -> float:
        return self._began

    @property
    def duration_s(self) -> float:
        """From the first send to the last answer; while running, until now."""
        return (self._ended or time.perf_counter()) - self._began if self._began else 0.0

    def stop(self) -> None:
        """Sends no further requests. Those already sent run to their end."""
        self._stopping.set()

    async def run(self, stop_after_s: float | None = None) -> None:
        self._began = time.perf_counter()
        alarm = (
            asyncio.get_running_loop().call_later(stop_after_s, self.stop)
            if stop_after_s is not None
            else None
        )
        try:
            async with asyncio.TaskGroup() as group:
                for index, session in enumerate(self._sessions):
                    if self._arrivals is not None:
                        await self._wait(self._began + self._arrivals[index] - time.perf_counter())
                    if self._slots is not None:
                        await self._slots.acquire()
                    if self._stopping.is_set():
                        break
                    group.create_task(self._converse(session))
        finally:
            self._ended = time.perf_counter()
            if alarm is not None:
                alarm.cancel()

    async def _wait(self, delay_s: float) -> None:
        if delay_s > 0:
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                pass

    async def _converse(self, session: Session) -> None:
        try:
            history: list[str] = []
            for index, turn in enumerate(session.turns):
                if index:
                    await self._wait(turn.wait_s)
                    if self._stopping.is_set():
                        return
                trace = self._trace if session is self._traced and not index else ""
                timeline = Timeline(
                    self.label, turn.max_tokens, prompt_tokens=turn.prompt_tokens, trace=trace
                )
                self.active.add(timeline)
                try:
                    await self._api.ask(self._conversation(history, turn.prompt), timeline)
                finally:
                    self.active.discard(timeline)
                self.timelines.append(timeline)
                if not timeline.succeeded:
                    return
                history += [str(turn.prompt), "".join(timeline.text)]
        finally:
            if self._slots is not None:
                self._slots.release()

    def _conversation(self, history: list[str], prompt: Prompt) -> Prompt | list[Message]:
        if not self._api.is_chat:
            return prompt if not history else "".join(history) + str(prompt)
        said = [*history, str(prompt)]
        return [
            {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(said)
        ]
