"""Generated requests whose answers are known, and their results."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from tandem.base.errors import Unavailable
from tandem.cluster.api_client import trusted

_WORDS = (
    "river stone window garden paper market bridge winter summer engine letter number station doctor "
    "village forest mirror candle yellow silver broken simple quiet early moving bright narrow distant"
)
# (words of the prompt, tokens of the answer): short and long, so that blows meet prompts, transfers and answers.
_SHAPES = ((12, 96), (40, 48), (120, 64), (400, 32), (700, 24))
_A_REQUEST_S = 180.0
_RETRY_S = 0.5
NOTED_GAP_S = 0.2  # shorter gaps are not recorded


@dataclass
class ProbeQuestion:
    body: dict[str, Any]
    answer: str | None = None  # None: the cluster's answers differ even without blows


class Traffic(msgspec.Struct):
    """What clients experienced. For a cluster's own traffic, the routers' counters tell only requests and errors."""

    source: str  # "probes" or "own"
    requests: int = 0
    right: int = 0
    unchecked: int = 0  # finished, but the question has no single answer
    wrong: list[str] = []
    refused: int = 0  # with a status and a reason, before the first byte
    failed: dict[str, int] = {}  # ended with an error event, by its code
    lost: dict[str, int] = {}  # ended without a word, or did not end
    examples: dict[str, str] = {}

    @property
    def unanswered(self) -> int:
        """Requests that were admitted and got no whole answer."""
        return sum(self.failed.values()) + sum(self.lost.values())


class _UnfinishedAnswer(Exception):
    """A request that ended without a whole answer."""

    def __init__(self, kind: str, name: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.name = kind, name


class Probes:
    def __init__(
        self,
        url: Callable[[], str],
        key: str | None,
        model: str,
        seed: int,
        users: int,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        salted: bool = True,
    ) -> None:
        """`salted`: each request has a salt of its own, so that its answer comes from no cache."""
        self._salted = salted
        self.counts = Traffic("probes")
        self.gaps: list[tuple[float, float]] = []  # begin and end, on the monotonic clock
        self._url = url  # returns the URL of a router that serves
        self._users = users
        self._random = random.Random(seed)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._transport = transport
        self.questions = [
            ProbeQuestion(self._body(model, words, tokens, seeded))
            for words, tokens in _SHAPES
            for seeded in (False, True)
        ]

    def _body(self, model: str, words: int, tokens: int, seeded: bool) -> dict[str, Any]:
        sampling = {"temperature": 0.8, "seed": self._random.randrange(1 << 30)} if seeded else {"temperature": 0}
        return {
            "model": model, "prompt": " ".join(self._random.choices(_WORDS.split(), k=words)), "max_tokens": tokens,
            "ignore_eos": True, "stream": True, **sampling,
        }  # fmt: skip

    def _client(self) -> httpx.AsyncClient:
        # Each request has its own connection, so that a router's death breaks only its own requests.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(_A_REQUEST_S, connect=10.0)
        return httpx.AsyncClient(
            headers=self._headers,
            limits=limits,
            timeout=timeout,
            trust_env=False,
            transport=self._transport,
            verify=trusted(self._url()),
        )

    async def learn(self) -> int:
        """Learns the questions' answers before the first blow: asks each alone, then all at once. A question whose answers differ is still
        asked later, but its answer is not checked. Returns how many are checked."""
        async with self._client() as http:
            try:
                alone = [await self._ask(http, one) for one in self.questions]
                together = await asyncio.gather(*(self._ask(http, one) for one in self.questions))
            except _UnfinishedAnswer as error:
                raise Unavailable(
                    f"a question is not answered before any blow: {error}. Mend the cluster first (`tandem status`)"
                ) from error
        for question, first, again in zip(self.questions, alone, together, strict=True):
            question.answer = first if first == again else None
        self.gaps.clear()
        return sum(one.answer is not None for one in self.questions)

    async def run(self, ending: asyncio.Event) -> None:
        """Asks until `ending` is set. Returns when the last answer has come."""
        async with self._client() as http, asyncio.TaskGroup() as group:
            for _ in range(self._users):
                group.create_task(self._user(http, ending))

    async def _user(self, http: httpx.AsyncClient, ending: asyncio.Event) -> None:
        counts = self.counts
        while not ending.is_set():
            question = self._random.choice(self.questions)
            counts.requests += 1
            try:
                text = await self._ask(http, question)
            except asyncio.CancelledError:
                counts.requests -= 1  # what would have come of it is not known
                raise
            except _UnfinishedAnswer as error:
                self._note(error)
                await asyncio.sleep(_RETRY_S)  # as a client would after a refusal
                continue
            if question.answer is None:
                counts.unchecked += 1
            elif text == question.answer:
                counts.right += 1
            else:
                counts.wrong.append(f"{text[:200]!r} instead of {question.answer[:200]!r}")

    def _note(self, error: _UnfinishedAnswer) -> None:
        self.counts.examples.setdefault(error.name, str(error)[:300])
        if error.kind == "refused":
            self.counts.refused += 1
        else:
            counts = self.counts.failed if error.kind == "failed" else self.counts.lost
            counts[error.name] = counts.get(error.name, 0) + 1

    async def _ask(self, http: httpx.AsyncClient, question: ProbeQuestion) -> str:
        """Returns the answer; raises _UnfinishedAnswer."""
        salt = {"cache_salt": f"chaos {self._random.random()}"} if self._salted else {}
        body = question.body | salt
        text, done = "", False
        last = time.monotonic()
        try:
            async with (
                asyncio.timeout(_A_REQUEST_S),
                http.stream("POST", f"{self._url()}/v1/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    raise _UnfinishedAnswer("refused", f"http {response.status_code}", said)
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event: dict[str, Any] = msgspec.json.decode(line[6:])
                        if "error" in event:
                            raise _UnfinishedAnswer("failed", str(event["error"].get("code") or "error"), line[6:])
                        text += "".join(choice.get("text", "") for choice in event["choices"])
                        last = self._note_gap(last)
        except TimeoutError as error:
            raise _UnfinishedAnswer("lost", "no end", f"it had not ended after {_A_REQUEST_S:.0f} s") from error
        except httpx.HTTPError as error:
            raise _UnfinishedAnswer("lost", type(error).__name__, str(error)) from error
        if not done:
            raise _UnfinishedAnswer("lost", "cut off", "the stream ended without [DONE] and without an error")
        return text

    def _note_gap(self, last: float) -> float:
        now = time.monotonic()
        if now - last >= NOTED_GAP_S:
            self.gaps.append((last, now))
        return now


def longest_gap(gaps: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    return max((last - first for first, last in gaps if first < end and last > begin), default=0.0)
