"""What the answers of all endpoints share: id, usage, and writing JSON of any size in bounded pieces.

Code that writes such pieces makes one at a time and lets the event loop go on in between, so that one large
answer does not stop other streams.
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
_CHARACTERS = 16 << 10  # the most characters of one piece
_ITEMS = 1024
_NUMBERS = frozenset({int, float, bool, type(None)})

json_at_once = msgspec.json.Encoder().encode


class RawPieces:
    """A value that is already JSON, in pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces

    def joined(self) -> msgspec.Raw:
        return msgspec.Raw(b"".join(self.pieces))


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yields `value` as msgspec would encode it, in bounded pieces. An iterator is written as a list whose
    items are made one by one. Objects are written member by member; lists are only split by length."""
    if _is_small(value):
        yield json_at_once(value)
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
                yield before + json_at_once(small)[1:-1]
                small, before = {}, b","
            yield before + json_at_once(name) + b":"
            yield from json_pieces(item)
            before = b","
        yield before + json_at_once(small)[1:] if small else b"}"
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
            yield json_at_once(value[start : start + _CHARACTERS])[1:-1]
        yield b'"'
    else:
        for start in range(0, len(value), _ITEMS):
            yield (b"," if start else b"[") + json_at_once(value[start : start + _ITEMS])[1:-1]
        yield b"]"


def _is_small(value: Any) -> bool:
    """Whether the value may be encoded at once."""
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
    """Measures for how long one task has held the event loop."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Starts a turn. Must be called when the task wakes up, so that its waiting does not count."""
        self._until = time.monotonic() + TURN_S

    async def pass_on(self) -> None:
        """Lets other tasks run if this one's turn is over."""
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
    """Implements `stream_options.include_usage`: null in every event, and the figures in an event of their
    own at the end."""

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
    """Counts each prompt once, however many choices it has, and every generated token, also those of choices
    that best_of dropped."""
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
