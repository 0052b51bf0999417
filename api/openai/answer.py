"""What the answers of all endpoints share: a choice, which turns the tokens of one life into text as they
arrive, up to a stop string; the answer's id; and writing JSON of any size in bounded pieces.

A stop string is found wherever it ends, also across tokens; text that may become one is held back.

Code that writes such pieces makes one at a time and lets the event loop go on in between, so that one large
answer does not stop other streams.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tandem.api.lives import ReadableLife
from tandem.api.pieces import AnswerReader, Arguments, CallBegins, Piece, Text
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import TandemError
from tandem.wire.requests import new_id
from tandem.wire.sampling import FinishReason

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

# An answer that is far ahead of its reader is read in pieces of this size, and the event loop goes on in
# between.
PIECE_TOKENS = 256


class Delta(msgspec.Struct, frozen=True):
    text: str
    tokens: range = range(0)  # the output tokens whose log-probabilities are shown with it
    finish_reason: str | None = None
    cut: bool = False  # with a finish_reason: not where the model would have ended
    token_ids: Sequence[int] = ()  # only if the request asks for them


# A reader gets a long text in parts of so many characters: it copies what it has not read yet.
_PART = 4096


class PieceReader:
    """Turns a choice's deltas into pieces. `cut_call`: the answer's end, a stop string for example, came within a call."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._arguments: list[str] | None = None  # of the last call
        self.cut_call = False

    def read(self, delta: Delta) -> list[Piece]:
        """Returns what a delta adds to the answer; with its end, also what the reader held back."""
        reader, text = self._reader, delta.text
        if reader is None:
            return [Text(text)] if text else []
        pieces = reader.push(text[:_PART])
        for at in range(_PART, len(text), _PART):
            pieces += reader.push(text[at : at + _PART])
        for piece in pieces:
            if isinstance(piece, CallBegins):
                self._arguments = []
            elif isinstance(piece, Arguments) and self._arguments is not None:
                self._arguments.append(piece.text)
        if delta.finish_reason is not None:
            # Some formats close what is open now, so it must be looked at before.
            self.cut_call = delta.cut and self._arguments is not None and not _is_json("".join(self._arguments))
            pieces += reader.finish(cut=delta.cut)
        return pieces


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class StopMatcher:
    """Finds stop strings in text that arrives in pieces. The result does not depend on how the text is
    cut."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is certainly part of the answer. Returns "" once `matched` is set."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end = self._first_match(text)
        if end is not None:
            self._held = ""
            return text[:end]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Ends the stream. Returns what was held back, which is text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Returns where the answer ends if a stop string is complete. The first to be complete wins,
        whichever way the text was cut; among those complete at the same character, the longest, because it
        began first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        self.matched = best[2]
        return best[0] if self._include_stop else best[1]

    def _possible_start(self, text: str) -> int:
        """Returns the first position from which the text could still grow into a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)


class Choice:
    """One choice of an answer: the tokens of one life, turned into text as they arrive. Reads the life's ledger
    from its last position on, and ends the life when a stop string is complete."""

    def __init__(
        self,
        index: int,
        life: ReadableLife,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        shown_marks: Collection[str] = (),
        show_logprobs: bool = False,
        show_token_ids: bool = False,
        text_offset: int = 0,
    ) -> None:
        self.index = index
        self.life = life
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        self.tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special=skip_special, shown=shown_marks)
        self._stops = StopMatcher(stops, include_stop=include_stop)
        self._include_stop = include_stop
        self._by_token = bool(stops) or show_logprobs
        self._show_logprobs = show_logprobs
        self._show_token_ids = show_token_ids
        self._ids_shown = 0
        self._text_length = text_offset  # characters that the detokenizer has given, held back or not
        self.offsets = array("q")  # where each token begins in the text, if log-probabilities are shown

    @property
    def behind(self) -> bool:
        """Whether more tokens have arrived than were read."""
        return self.finish_reason is None and self.completion_tokens < len(self.life.ledger.tokens)

    @property
    def shown_tokens(self) -> range:
        """The output tokens whose log-probabilities are shown."""
        return range(self.completion_tokens if self._show_logprobs else 0)

    def advance(self, most: int = PIECE_TOKENS) -> Delta | None:
        """Reads up to `most` new tokens. Returns what they add, or None. Nothing follows after a
        finish_reason, nor when `failed` is set and `behind` is false."""
        life = self.life
        if self.finish_reason is not None:
            return None
        tokens = life.ledger.tokens
        start = self.completion_tokens
        end = min(len(tokens), start + most)
        at_end = life.ended and life.error is None and end == len(tokens)
        # The stop token is the last token, and not part of the text.
        silent_end = end - 1 if at_end and self._ends_with_stop_token() else end
        if self._by_token:
            text = self._advance_by_token(start, end, silent_end)
        else:
            text = self._detokenizer.push(tokens[start:silent_end])
            self.completion_tokens = end
        shown = range(start, self.completion_tokens) if self._show_logprobs else range(0)
        if at_end and self._stops.matched is None:
            text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
            self.finish_reason = _FINISH.get(life.finish or FinishReason.STOP, "stop")
        if self._stops.matched is not None:
            self.finish_reason = "stop"
            life.stop()
        if not text and not shown and self.finish_reason is None:
            return None
        ids: Sequence[int] = ()
        if self._show_token_ids:
            ids = tokens[self._ids_shown : self.completion_tokens]
            self._ids_shown = self.completion_tokens
        return Delta(text, shown, self.finish_reason, self.cut, ids)

    @property
    def stop_matched(self) -> str | None:
        """The stop string that ended the choice, or None."""
        return self._stops.matched

    @property
    def stop_reason(self) -> str | int | None:
        """What of the request ended the choice: a stop string, or a token of its stop_token_ids. None for any other end."""
        life = self.life
        if self._stops.matched is not None or self.finish_reason != "stop":
            return self._stops.matched
        token = life.ledger.stop_token
        return token if token in life.spec.facts.sampling.stop_token_ids else None

    @property
    def cut(self) -> bool:
        """Whether the model would have written more: max_tokens or a stop string ended the choice."""
        return self.finish_reason == "length" or self._stops.matched is not None

    @property
    def token_ids(self) -> Sequence[int]:
        return self.life.ledger.tokens[: self.completion_tokens]

    @property
    def failed(self) -> TandemError | None:
        """Why the rest will never arrive. None if the choice is complete: a stop string may have come before
        the failure."""
        return self.life.error if self.finish_reason is None else None

    def _advance_by_token(self, start: int, end: int, silent_end: int) -> str:
        ledger, minimum = self.life.ledger, self.life.spec.facts.sampling.min_tokens
        pieces: list[str] = []
        for index in range(start, end):
            if self._show_logprobs:
                self.offsets.append(self._text_length)
            self.completion_tokens = index + 1
            if index >= silent_end:
                continue
            text = self._detokenizer.push((ledger.tokens[index],))
            self._text_length += len(text)
            # Before min_tokens nothing ends the answer, not even a stop string.
            pieces.append(text if index < minimum else self._stops.push(text))
            if self._stops.matched is not None:
                break
        return "".join(pieces)

    def _ends_with_stop_token(self) -> bool:
        ledger = self.life.ledger
        return (
            not self._include_stop
            and ledger.finish is FinishReason.STOP
            and ledger.stop_token is not None
            and bool(ledger.tokens)
            and ledger.tokens[-1] == ledger.stop_token
        )


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
    items are made one by one. Objects are written member by member, and lists with large items item by
    item."""
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
        before = b"["
        for start in range(0, len(value), _ITEMS):
            part = value[start : start + _ITEMS]
            if _is_small(part):
                yield before + json_at_once(part)[1:-1]
                before = b","
                continue
            for item in part:
                yield before
                yield from json_pieces(item)
                before = b","
        yield b"]"


def _is_small(value: Any) -> bool:
    """Whether the value may be encoded at once."""
    kind = type(value)
    if kind is str:
        return len(value) <= _CHARACTERS
    if kind in _NUMBERS:
        return True
    if kind is list:
        return len(value) <= _ITEMS and (set(map(type, value)) <= _NUMBERS or all(map(_is_small, value)))
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
