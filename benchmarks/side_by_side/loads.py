"""The loads for every system: one user, some, many; chats while long prompts arrive; a prefix that all prompts share.

All prompts are made once per run and are the same for every system, so no figure depends on a random draw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from tandem.base.errors import Unavailable
from tandem.loadgen.api import Api, RequestShape
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.load import LoadStream
from tandem.loadgen.show import with_progress
from tandem.loadgen.timeline import Timeline
from tandem.loadgen.vocabulary import Vocabulary
from tandem.loadgen.workload import Lengths, Session, random_prompts, shared_prefix

ALONE, BESIDE, LONG = "chats alone", "chats beside long prompts", "the long prompts"
SHARED = "shared prefix"

_A_REQUEST_S = 180.0
_WARM_UPS = 2
_HANDOVERS = 7


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How large each load is. Counts are requests, lengths are tokens."""

    closed_loops: tuple[tuple[int, int], ...]  # users, and how many requests they make in all
    prompt: Lengths
    chat_users: int
    chat: Lengths
    chats_alone_s: float
    long_prompts: int
    long: Lengths
    long_every_s: float
    shared_users: int
    shared_requests: int
    shared_prefix: int
    shared: Lengths
    # After this nothing more is sent: a slow system gets fewer requests, and the report shows it
    at_most_s: float


FULL = LoadPlan(
    closed_loops=((1, 8), (4, 24), (8, 48)),
    prompt=Lengths(512, 64),
    chat_users=3,
    chat=Lengths(64, 64),
    chats_alone_s=20.0,
    long_prompts=10,
    long=Lengths(2048, 8),
    long_every_s=4.0,
    shared_users=4,
    shared_requests=24,
    shared_prefix=1000,
    shared=Lengths(64, 32),
    at_most_s=90.0,
)
QUICK = replace(
    FULL, closed_loops=((1, 3), (4, 8), (8, 16)), chats_alone_s=8.0, long_prompts=3, shared_requests=8, at_most_s=12.0
)


def closed_loop(users: int) -> str:
    return "1 user" if users == 1 else f"{users} users"


def cells_of(plan: LoadPlan) -> list[str]:
    """Returns every load's name, in the order of the table."""
    return [*(closed_loop(users) for users, _ in plan.closed_loops), ALONE, BESIDE, LONG, SHARED]


@dataclass(frozen=True, slots=True)
class LoadQuestions:
    """The prompts of one run."""

    warm_up: list[Session]
    closed_loops: list[list[Session]]
    chats_alone: list[Session]
    chats_beside: list[Session]
    long: list[Session]
    shared: list[Session]
    handed_over: list[Session]

    @classmethod
    def draw(cls, plan: LoadPlan, vocabulary: Vocabulary, seed: int) -> LoadQuestions:
        rng = np.random.default_rng(seed)
        # More than enough for every user and second, because chats go on until the long prompts have been answered.
        chats = round(plan.chat_users * (plan.at_most_s + plan.long_prompts * plan.long_every_s) * 4)
        return cls(
            warm_up=random_prompts(vocabulary, rng, _WARM_UPS, plan.prompt)
            + random_prompts(vocabulary, rng, _WARM_UPS, plan.chat)
            + random_prompts(vocabulary, rng, 1, plan.long),
            closed_loops=[random_prompts(vocabulary, rng, count, plan.prompt) for _, count in plan.closed_loops],
            chats_alone=random_prompts(vocabulary, rng, chats, plan.chat),
            chats_beside=random_prompts(vocabulary, rng, chats, plan.chat),
            long=random_prompts(vocabulary, rng, plan.long_prompts, plan.long),
            # The first request brings the prefix into the cache and is not measured.
            shared=shared_prefix(vocabulary, rng, plan.shared_requests + 1, plan.shared, plan.shared_prefix, 1),
            handed_over=random_prompts(vocabulary, rng, _HANDOVERS, plan.prompt),
        )


class Examiner:
    """Sends one system all loads, one after another."""

    def __init__(
        self, url: str, model: str, plan: LoadPlan, questions: LoadQuestions, console: Console, title: str
    ) -> None:
        self._address = Address.of_url(url)
        self._shape = RequestShape(model, timeout_s=_A_REQUEST_S)
        self._plan = plan
        self._questions = questions
        self._console = console
        self._title = title

    def examine(self) -> tuple[float, list[LoadStream]]:
        """Returns the seconds to the first token of the system's first request, and the loads, each labelled as in `cells_of`."""
        return asyncio.run(self._examine())

    async def _examine(self) -> tuple[float, list[LoadStream]]:
        plan, questions = self._plan, self._questions
        async with HttpClient(self._address) as http:
            api = Api(http, self._shape)
            first, *_ = await self._warm_up(api, questions.warm_up)
            measured = []
            for (users, _), asked in zip(plan.closed_loops, questions.closed_loops, strict=True):
                measured.append(await self._closed(api, closed_loop(users), asked, users, plan.at_most_s))
            measured.append(await self._closed(api, ALONE, questions.chats_alone, plan.chat_users, plan.chats_alone_s))
            measured += await self._chats_beside_long(api)
            await self._warm_up(api, questions.shared[:1])
            measured.append(await self._closed(api, SHARED, questions.shared[1:], plan.shared_users, plan.at_most_s))
        return first.ttft, measured

    async def _warm_up(self, api: Api, sessions: Sequence[Session]) -> list[Timeline]:
        load = LoadStream("warm-up", api, sessions, concurrency=1)
        await self._run(load.run(), [load])
        for timeline in load.timelines:
            if timeline.failure is not None:
                raise Unavailable(f"the warm-up failed, {timeline.failure.kind}: {timeline.failure}")
        return load.timelines

    async def _closed(
        self, api: Api, cell: str, sessions: Sequence[Session], users: int, at_most_s: float
    ) -> LoadStream:
        load = LoadStream(cell, api, sessions, concurrency=users)
        await self._run(load.run(at_most_s), [load])
        return load

    async def _chats_beside_long(self, api: Api) -> list[LoadStream]:
        """Chats run for exactly as long as there are long prompts to be answered."""
        plan, questions = self._plan, self._questions
        chats = LoadStream(BESIDE, api, questions.chats_beside, concurrency=plan.chat_users)
        # The first long prompt comes when the chats are running.
        times = [plan.long_every_s * (index + 0.5) for index in range(plan.long_prompts)]
        long = LoadStream(LONG, api, questions.long, arrivals=times)

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(chats.run())
                await long.run()
                chats.stop()

        await self._run(both(), [chats, long])
        return [chats, long]

    async def _run(self, run: Coroutine[None, None, None], loads: list[LoadStream]) -> None:
        await with_progress(run, loads, self._console, f"{self._title}, {loads[0].label}")
