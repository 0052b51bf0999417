"""Sends a workload to a server and records every request's timeline. Also makes the sessions and their arrival times from a run's
options. Prompts and arrival times come from separate random streams, so runs at different rates send the same prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from tandem.base.errors import ConfigurationError
from tandem.loadgen.api import Api, Message, Prompt
from tandem.loadgen.options import Options, Workload
from tandem.loadgen.timeline import Timeline
from tandem.loadgen.traces import read_trace, replay
from tandem.loadgen.vocabulary import Vocabulary
from tandem.loadgen.workload import Lengths, Session, multi_turn, random_prompts, shared_prefix


class LoadStream:
    """One stream of sessions under one label. Several streams may run side by side on one event loop.

    With `arrivals`, each session is sent at its time, or later if `concurrency` sessions are running. Without `arrivals`, the
    next session is sent as soon as one of `concurrency` users is free.
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
        """`trace` is an id for the request in the middle of the run, which the server is asked to trace."""
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
        self.began_at = self._ended = 0.0

    @property
    def duration_s(self) -> float:
        """The time from the first send to the last answer; while the run goes on, until now."""
        return (self._ended or time.perf_counter()) - self.began_at if self.began_at else 0.0

    def stop(self) -> None:
        """Sends no further requests. Those already sent run to their end."""
        self._stopping.set()

    async def run(self, stop_after_s: float | None = None) -> None:
        self.began_at = time.perf_counter()
        alarm = asyncio.get_running_loop().call_later(stop_after_s, self.stop) if stop_after_s is not None else None
        try:
            async with asyncio.TaskGroup() as group:
                for index, session in enumerate(self._sessions):
                    if self._arrivals is not None:
                        await self._wait(self.began_at + self._arrivals[index] - time.perf_counter())
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
                timeline = Timeline(self.label, turn.max_tokens, prompt_tokens=turn.prompt_tokens, trace=trace)
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
        return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(said)]


_MEASURED, _WARM_UP, _ARRIVALS = range(3)


def make_sessions(options: Options, vocabulary: Vocabulary) -> tuple[list[Session], list[Session]]:
    """Returns the sessions to measure, and sessions of the same kind for the warm-up, which share no prompt with them."""
    measured, before = (np.random.default_rng((options.seed, stream)) for stream in (_MEASURED, _WARM_UP))
    lengths = Lengths(options.input, options.output, options.spread)
    if options.workload is Workload.TRACE and options.trace is not None:
        rows = read_trace(options.trace, options.sessions)
        sessions = replay(rows, vocabulary, options.seed, options.trace_speed, options.trace_scale)
        return sessions, random_prompts(vocabulary, before, options.warmup_sessions, lengths)
    count = options.sessions or 0
    return (
        _synthetic(options, vocabulary, measured, lengths, count),
        _synthetic(options, vocabulary, before, lengths, options.warmup_sessions),
    )


def _synthetic(
    options: Options, vocabulary: Vocabulary, rng: np.random.Generator, lengths: Lengths, count: int
) -> list[Session]:
    if options.workload is Workload.SHARED_PREFIX:
        return shared_prefix(vocabulary, rng, count, lengths, options.prefix, options.prefixes)
    if options.workload is Workload.MULTI_TURN:
        turn_input = options.turn_input or options.input
        return multi_turn(vocabulary, rng, count, lengths, options.turns, turn_input, options.think)
    return random_prompts(vocabulary, rng, count, lengths)


def arrival_times(options: Options, sessions: list[Session]) -> list[float] | None:
    if options.follows_trace:
        return [session.arrival_s or 0.0 for session in sessions]
    if options.rate is not None:
        return poisson(np.random.default_rng((options.seed, _ARRIVALS)), len(sessions), options.rate)
    return None


def poisson(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    """Returns arrival times in seconds from the start of the run, with exponential gaps, scaled so that the last one is at `count / rate`.
    Given the time of the last arrival, the others are still a Poisson process, and every seed offers the same load."""
    if rate <= 0:
        raise ConfigurationError(f"the rate must be above 0 requests a second, not {rate:g}")
    times = np.cumsum(rng.exponential(size=count))
    return [float(time) for time in times * (count / rate / times[-1])] if count else []
