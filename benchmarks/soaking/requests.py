"""The requests of a soak: what is asked, how an answer is read, and many clients at once.

Some questions recur: their answers are known, and must never change.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from tandem.base.errors import Unavailable


class AnswerEnd(enum.StrEnum):
    WHOLE = "whole"  # not streamed
    STREAM = "stream"
    ABORT = "abort"  # the client goes away in the middle


@dataclass(frozen=True, slots=True)
class SoakQuestion:
    body: dict[str, Any]
    is_chat: bool
    ending: AnswerEnd
    known: int | None = None  # its number among the known questions
    abort_after_s: float = 0.0
    kinds: tuple[str, ...] = ()  # the names in the table of results

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


@dataclass(slots=True)
class KnownAnswer:
    """A question with one right answer, greedy or seeded. `answer` is the quiet cluster's."""

    body: dict[str, Any]
    is_chat: bool
    answer: str | None = None


# (tokens of the prompt, tokens of the answer)
_KNOWN_LENGTHS = ((12, 48), (40, 24), (120, 40), (300, 24), (520, 32), (900, 16))
_FILLERS, _FILLER = 16, 1500
_ABORTED = 0.12
_KNOWN = 0.35
_CHAT = 0.4


class SoakQuestions:
    """`words` are about one token each: exact lengths do not matter here."""

    def __init__(self, words: Sequence[str], model: str, seed: int) -> None:
        self._words = words
        self._model = model
        self._random = random.Random(seed)
        self.known = [known for lengths in _KNOWN_LENGTHS for known in self._make_known(*lengths)]

    def _text(self, tokens: int) -> str:
        return " ".join(self._random.choices(self._words, k=tokens))

    def _make_known(self, prompt: int, answer: int) -> list[KnownAnswer]:
        greedy = {"temperature": 0, "ignore_eos": True}
        seeded = {"temperature": 0.8, "top_p": 0.95, "seed": self._random.randrange(1 << 31), "ignore_eos": True}
        return [
            KnownAnswer(self._completion(self._text(prompt), answer) | greedy, is_chat=False),
            KnownAnswer(self._completion(self._text(prompt), answer) | seeded, is_chat=False),
            KnownAnswer(self._chat(self._text(prompt), answer) | greedy, is_chat=True),
        ]

    def _completion(self, text: str, answer: int) -> dict[str, Any]:
        return {"model": self._model, "prompt": text, "max_tokens": answer}

    def _chat(self, text: str, answer: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": self._model, "messages": messages, "max_completion_tokens": answer}

    def fillers(self) -> list[SoakQuestion]:
        """Returns long prompts that are all different."""
        return [
            SoakQuestion(self._completion(self._text(_FILLER), 2), is_chat=False, ending=AnswerEnd.WHOLE)
            for _ in range(_FILLERS)
        ]

    def draw(self) -> SoakQuestion:
        rng = self._random
        ending = AnswerEnd.STREAM if rng.random() < 0.6 else AnswerEnd.WHOLE
        if rng.random() < _ABORTED:
            question = self._fresh(AnswerEnd.ABORT)
            # Many clients go away early, some much later, so that every phase is covered.
            return SoakQuestion(
                _endless(question),
                question.is_chat,
                AnswerEnd.ABORT,
                abort_after_s=rng.expovariate(1.0),
                kinds=("abort",),
            )
        if rng.random() < _KNOWN:
            index = rng.randrange(len(self.known))
            known = self.known[index]
            return SoakQuestion(known.body, known.is_chat, ending, known=index, kinds=(ending.value, "known"))
        return self._fresh(ending)

    def _fresh(self, ending: AnswerEnd) -> SoakQuestion:
        rng = self._random
        prompt = rng.choices((rng.randint(4, 64), rng.randint(100, 500), rng.randint(900, 1600)), (70, 24, 6))[0]
        is_chat = rng.random() < _CHAT
        body = (self._chat if is_chat else self._completion)(self._text(prompt), rng.randint(1, 64))
        kinds = [ending.value, "chat" if is_chat else "completion", "long" if prompt >= 900 else "short"]
        body["temperature"] = rng.choice((0, 0.7, 1.0))
        extra = rng.random()
        if extra < 0.1:
            body["n"] = 2
            kinds.append("n=2")
        elif extra < 0.2:
            body["stop"] = [" the", "\n\n"]
            kinds.append("stop")
        elif extra < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
            kinds.append("logprobs")
        elif extra < 0.38 and is_chat:
            body["response_format"] = {"type": "json_object"}
            kinds.append("json")
        return SoakQuestion(body, is_chat, ending, kinds=tuple(kinds))


def _endless(question: SoakQuestion) -> dict[str, Any]:
    """Makes the answer long enough that a client that goes away does so in the middle. An answer that follows a grammar ends with it."""
    longest = {"max_completion_tokens" if question.is_chat else "max_tokens": 200}
    if "response_format" not in question.body:
        longest["ignore_eos"] = True
    return question.body | longest


@dataclass(slots=True)
class AnswerTally:
    """What became of the requests."""

    answered: int = 0
    aborted: int = 0
    tokens: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    checked: int = 0  # answers to known questions
    wrong: list[str] = field(default_factory=list)
    news: list[str] = field(default_factory=list)  # failures that have not been reported yet

    def failed(self, kind: str, example: str) -> None:
        """Keeps a description of the first failure of each kind, and counts the others."""
        if kind not in self.failures:
            self.examples[kind] = example[:300]
            self.news.append(f"failed, {kind}: {self.examples[kind]}")
        self.failures[kind] = self.failures.get(kind, 0) + 1

    def answered_wrongly(self, what: str) -> None:
        self.wrong.append(what)
        self.news.append(f"wrong: {what}")


class WrongAnswer(Exception):
    """The answer is not what was asked for. Failures are counted by `kind`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    text: str  # the texts of all choices, joined
    tokens: int


async def ask(client: httpx.AsyncClient, question: SoakQuestion) -> Answer | None:
    """Returns None if the client went away, as the question wants it. Raises WrongAnswer."""
    try:
        if question.ending is AnswerEnd.WHOLE:
            return await _whole(client, question)
        if question.ending is AnswerEnd.STREAM:
            return await _stream(client, question)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(question.abort_after_s):
                await _stream(client, question)
        return None
    except httpx.HTTPError as error:
        raise WrongAnswer(type(error).__name__, str(error)) from error


async def _whole(client: httpx.AsyncClient, question: SoakQuestion) -> Answer:
    response = await client.post(question.path, json=question.body)
    if response.status_code != 200:
        raise WrongAnswer(f"http_{response.status_code}", response.text)
    body: dict[str, Any] = response.json()
    texts = [_text_of(choice, "message") for choice in body["choices"]]
    _check(question, [choice["finish_reason"] for choice in body["choices"]])
    return Answer("\0".join(texts), int(body["usage"]["completion_tokens"]))


async def _stream(client: httpx.AsyncClient, question: SoakQuestion) -> Answer:
    body = question.body | {"stream": True, "stream_options": {"include_usage": True}}
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    tokens, done = 0, False
    async with client.stream("POST", question.path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise WrongAnswer(f"http_{response.status_code}", response.text)
        async for line in response.aiter_lines():
            if line.startswith("event: error"):
                continue  # the event's data says the same
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event: dict[str, Any] = msgspec.json.decode(line[6:])
                if "error" in event:
                    raise WrongAnswer("stream_error", line[6:])
                for choice in event["choices"]:
                    index = choice["index"]
                    texts[index] = texts.get(index, "") + _text_of(choice, "delta")
                    if choice.get("finish_reason"):
                        finishes[index] = choice["finish_reason"]
                if event.get("usage"):
                    tokens = int(event["usage"]["completion_tokens"])
    if not done:
        raise WrongAnswer("truncated", "the stream ended without [DONE]")
    _check(question, list(finishes.values()))
    return Answer("\0".join(texts[index] for index in sorted(texts)), tokens)


def _text_of(choice: dict[str, Any], key: str) -> str:
    return str(choice["text"] if "text" in choice else choice.get(key, {}).get("content") or "")


def _check(question: SoakQuestion, finishes: list[str]) -> None:
    wanted = int(question.body.get("n", 1))
    if len(finishes) != wanted or not set(finishes) <= {"stop", "length"}:
        raise WrongAnswer("finish", f"finish reasons {finishes} of {wanted} choices")


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
