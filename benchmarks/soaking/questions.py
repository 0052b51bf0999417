"""The requests of a soak. Some questions recur: their answers are known, and must never change."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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
    kinds: tuple[str, ...] = ()  # for the table

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
        seeded = {
            "temperature": 0.8,
            "top_p": 0.95,
            "seed": self._random.randrange(1 << 31),
            "ignore_eos": True,
        }
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
        prompt = rng.choices(
            (rng.randint(4, 64), rng.randint(100, 500), rng.randint(900, 1600)), (70, 24, 6)
        )[0]
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
