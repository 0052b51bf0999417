"""What both endpoints' answers begin and end with."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.router.openai.choice import Choice
from tandem.router.openai.fields import StreamOptions
from tandem.router.openai.plan import GenerationPlan
from tandem.router.openai.usage import usage


class AnswerHead(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, created: int, model: str) -> AnswerHead:
        return cls(f"{prefix}-{secrets.token_hex(16)}", created, model)

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class StreamedUsage:
    """`stream_options.include_usage`: null in every event, the figures in one of their own at the end."""

    def __init__(
        self, options: StreamOptions | None, plan: GenerationPlan, choices: Sequence[Choice]
    ) -> None:
        self._included = bool(options and options.include_usage)
        self.continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        self._plan = plan
        self._choices = choices
        self.null = b',"usage":null' if self._included else b""

    def field(self) -> dict[str, Any]:
        if self.continuous:
            return {"usage": usage(self._plan, self._choices)}
        return {"usage": None} if self._included else {}

    def closing(self, head: Mapping[str, Any]) -> bytes:
        if not self._included:
            return b""
        return event({**head, "choices": [], "usage": usage(self._plan, self._choices)})
