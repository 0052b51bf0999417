"""What both endpoints' answers begin and end with, their usage included."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.router.openai.choice import Choice
from tandem.router.openai.fields import StreamOptions
from tandem.router.openai.plan import GenerationPlan


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


def usage(plan: GenerationPlan, choices: Sequence[Choice]) -> dict[str, Any]:
    """A prompt counts once, however many choices it has; every generated token counts, also of choices that
    best_of threw away."""
    completion = 0 if plan.only_echo else sum(choice.completion_tokens for choice in choices)
    cached = sum(
        choices[first].life.cached_tokens or 0 for first in range(0, len(choices), plan.choices_per_prompt)
    )
    figures: dict[str, Any] = {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": plan.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if (reasoning := plan.reasoning_tokens(choices)) is not None:
        figures["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return figures
