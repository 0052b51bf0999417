"""Sends one request, and reads until its end or until its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from benchmarks.soaking.questions import AnswerEnd, SoakQuestion


class WrongAnswer(Exception):
    """The answer is not what was asked for. Failures are counted by `kind`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    text: str  # of all choices
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
