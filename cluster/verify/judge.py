"""Judges a rollout by its answers: `tandem apply --verify`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tandem.base.errors import TandemError
from tandem.cluster.api_client import ANSWER_S, ApiClient, key_from_environment
from tandem.cluster.describe import counted
from tandem.cluster.verify.comparison import ComparedChoice, choices_of, first_difference
from tandem.cluster.verify.questions import Question, built_in, of_file

logger = logging.getLogger(__name__)

_ANSWER_S = 120.0
_LIVE_ANSWER_S = 300.0  # the router asks a few requests again, one after another
_MAX_TOKENS = 16
_CONTEXT = 256  # of the built-in requests: a rollout waits for each answer
_LIVE_S = 2.0  # how long a router listens to live requests at each look


def judge(url: str, file: Path | None) -> RequestJudge:
    return RequestJudge(url, of_file(file) if file is not None else built_in(_CONTEXT, _MAX_TOKENS))


class RequestJudge:
    """Keeps what requests were answered before a rollout, and asks them again. See `cluster.wings.RolloutJudge`."""

    def __init__(self, url: str, questions: list[Question]) -> None:
        self._server = ApiClient(url, key_from_environment())
        self._questions = questions
        self._known: list[list[ComparedChoice]] = []
        self._next = 0
        self._old: list[str] = []  # the nodes before the rollout
        self._live = self._live_tokens = 0

    def learn(self) -> int:
        nodes: Any = self._server.get("/cluster").json()["nodes"]
        self._old = [node["node_id"] for node in nodes]
        self._known = [self._ask(question)[0] for question in self._questions]
        return len(self._known)

    def ask_next(self) -> str:
        at, self._next = self._next, (self._next + 1) % len(self._questions)
        try:
            return self._live_difference() or self._difference(at)
        except TandemError as error:  # requests that fail are judged by the controller
            logger.warning("%s was not compared: %s", self._questions[at].name, error)
            return ""

    def ask_all(self) -> str:
        return next((found for at in range(len(self._questions)) if (found := self._difference(at))), "")

    @property
    def compared(self) -> str:
        return f"{counted(self._live, 'live request')} asked again of new nodes, with {self._live_tokens} tokens"

    def close(self) -> None:
        self._server.close()

    def _difference(self, at: int) -> str:
        question = self._questions[at]
        answer, nodes = self._ask(question)
        difference = first_difference(question.name, self._known[at], answer)
        return f"{difference}, answered by {nodes}" if difference is not None else ""

    def _live_difference(self) -> str:
        """The router asks some of the clients' requests again of the new nodes."""
        asked = msgspec.json.encode({"old": self._old, "seconds": _LIVE_S})
        timeout = httpx.Timeout(ANSWER_S, read=_LIVE_ANSWER_S)
        try:
            answer: Any = self._server.post("/verify", asked, timeout).json()
        except TandemError as error:
            logger.warning("live requests were not compared: %s", error)
            return ""
        self._live += answer["compared"]
        self._live_tokens += answer["tokens"]
        return str(answer["difference"])

    def _ask(self, question: Question) -> tuple[list[ComparedChoice], str]:
        timeout = httpx.Timeout(ANSWER_S, read=_ANSWER_S)
        answer = self._server.post(question.path, msgspec.json.encode(question.body), timeout)
        nodes = answer.headers.get("x-tandem-nodes", "unknown nodes")
        return choices_of(msgspec.json.decode(answer.content)), nodes
