"""Many clients at once, for as long as the soak lasts."""

from __future__ import annotations

import asyncio

import httpx

from benchmarks.soaking.asking import WrongAnswer, ask
from benchmarks.soaking.questions import AnswerEnd, AnswerTally, KnownAnswer, SoakQuestion, SoakQuestions
from tandem.base.errors import Unavailable

_A_REQUEST_S = 300.0


class SoakLoad:
    def __init__(self, url: str, questions: SoakQuestions, users: int) -> None:
        self.tally = AnswerTally()
        self._questions = questions
        self._users = users
        self._url = url
        self._stopping = asyncio.Event()

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._users)
        return httpx.AsyncClient(base_url=self._url, timeout=_A_REQUEST_S, trust_env=False, limits=limits)

    async def fill(self) -> None:
        """Fills every node's KV cache several times over, wherever the router sends the requests."""
        places = asyncio.Semaphore(self._users)

        async def ask_in_turn(client: httpx.AsyncClient, question: SoakQuestion) -> None:
            async with places:
                await ask(client, question)

        async with self._client() as client:
            try:
                await asyncio.gather(*(ask_in_turn(client, one) for one in self._questions.fillers()))
            except WrongAnswer as failure:
                raise Unavailable(f"a question asked in peace is not answered: {failure}") from failure

    async def learn(self) -> None:
        """Learns the known questions' answers from the cluster while it is quiet. Asks twice: an answer that differs without a load cannot be
        checked."""
        async with self._client() as client:
            for known in self._questions.known:
                first, again = [await self._answer(client, known) for _ in range(2)]
                if first != again:
                    raise Unavailable(f"asked twice in peace, the answers differ: {first!r} and {again!r}")
                known.answer = first

    async def _answer(self, client: httpx.AsyncClient, known: KnownAnswer) -> str:
        try:
            answer = await ask(client, SoakQuestion(known.body, known.is_chat, AnswerEnd.WHOLE))
        except WrongAnswer as failure:
            raise Unavailable(f"a question asked in peace is not answered: {failure}") from failure
        return answer.text if answer is not None else ""

    async def run(self, seconds: float) -> None:
        """Returns when the last answer has come."""
        asyncio.get_running_loop().call_later(seconds, self._stopping.set)
        async with self._client() as client, asyncio.TaskGroup() as group:
            for _ in range(self._users):
                group.create_task(self._user(client))

    async def _user(self, client: httpx.AsyncClient) -> None:
        while not self._stopping.is_set():
            question = self._questions.draw()
            try:
                answer = await ask(client, question)
            except WrongAnswer as failure:
                self.tally.failed(failure.kind, str(failure))
                continue
            for kind in question.kinds:
                self.tally.by_kind[kind] = self.tally.by_kind.get(kind, 0) + 1
            if answer is None:
                self.tally.aborted += 1
                continue
            self.tally.answered += 1
            self.tally.tokens += answer.tokens
            if question.known is not None:
                self._hold_to(question.known, answer.text)

    def _hold_to(self, index: int, text: str) -> None:
        known = self._questions.known[index]
        self.tally.checked += 1
        if text != known.answer:
            self.tally.answered_wrongly(f"question {index}: {text!r} instead of {known.answer!r}")
