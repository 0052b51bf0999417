"""What both endpoints' answers begin and end with, their usage included, and how one is written: JSON of any size in bounded pieces.

Whatever writes such pieces makes them one by one and lets others on the event loop have their turn in between, so that one large answer
does not stop the other streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tandem.router.openai.choice import Choice
from tandem.router.openai.fields import StreamOptions
from tandem.router.openai.plan import GenerationPlan
from tandem.wire.requests import new_id

TURN_S = 0.002
_CHARACTERS = 16 << 10  # of one piece
_ITEMS = 1024
_NUMBERS = frozenset({int, float, bool, type(None)})

_encode = json_at_once = msgspec.json.Encoder().encode


class RawPieces:
    """A value that is JSON already."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces

    def joined(self) -> msgspec.Raw:
        return msgspec.Raw(b"".join(self.pieces))


def json_pieces(value: Any) -> Iterator[bytes]:
    """`value` as msgspec would encode it. An iterator in it is a list whose items are made as they are written;
    objects are looked into, lists are not, except for their length."""
    if _is_small(value):
        yield _encode(value)
    elif isinstance(value, RawPieces):
        yield from value.pieces
    elif isinstance(value, Mapping):
        before = b"{"
        small: dict[str, Any] = {}
        for name, item in value.items():
            if _is_small(item):
                small[name] = item
                continue
            if small:
                yield before + _encode(small)[1:-1]
                small, before = {}, b","
            yield before + _encode(name) + b":"
            yield from json_pieces(item)
            before = b","
        yield before + _encode(small)[1:] if small else b"}"
    elif isinstance(value, Iterator):
        before = b"["
        for item in value:
            yield before
            yield from json_pieces(item)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    elif isinstance(value, str):
        yield b'"'
        for start in range(0, len(value), _CHARACTERS):
            yield _encode(value[start : start + _CHARACTERS])[1:-1]
        yield b'"'
    else:
        for start in range(0, len(value), _ITEMS):
            yield (b"," if start else b"[") + _encode(value[start : start + _ITEMS])[1:-1]
        yield b"]"


def _is_small(value: Any) -> bool:
    """It may be made at once."""
    kind = type(value)
    if kind is str:
        return len(value) <= _CHARACTERS
    if kind in _NUMBERS:
        return True
    if kind is list:
        return len(value) <= _ITEMS
    if kind is dict:
        return len(value) <= _ITEMS and all(map(_is_small, value.values()))
    return not isinstance(value, Iterator | RawPieces | Mapping)


class LoopTurn:
    """How long one task has had the event loop."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """To be called when the task was woken up: what it waited is not its turn."""
        self._until = time.monotonic() + TURN_S

    async def pass_on(self) -> None:
        """To others, if this one has had its turn."""
        if time.monotonic() > self._until:
            await asyncio.sleep(0)
            self.begin()


class AnswerHead(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, created: int, model: str) -> AnswerHead:
        return cls(f"{prefix}-{new_id()}", created, model)

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
