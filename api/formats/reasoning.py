"""Tells a model's reasoning apart from its answer."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from tandem.api.formats.cursor import CursorReader, Steps
from tandem.api.lark import ANY_TEXT, SOME_SPACE, LarkWriter, nested
from tandem.api.pieces import AnswerReader, Piece, Reasoning, Text
from tandem.api.text.tokenizer import Tokenizer

_MARK_TOKENS = 16  # the most tokens of a begin mark


class ReasoningStart(enum.Enum):
    """Where the prompt ends, relative to the reasoning."""

    OPEN = enum.auto()  # within the reasoning: the template wrote the begin mark
    FREE = enum.auto()  # before the answer: the model may begin with reasoning
    CLOSED = enum.auto()  # after the reasoning: the template wrote that there is none


class Bound(msgspec.Struct, frozen=True):
    """The most tokens of reasoning. Then only the token of the end mark can follow. A mark that is one token is written as
    that token, special or not."""

    tokens: int
    end_token: int
    begin_token: int | None

    def rules(self, rule: str) -> list[str]:
        if not self.tokens:
            return [f"{rule}: <[{self.end_token}]>"]
        return [f"{rule}: {rule}_text <[{self.end_token}]>", f"{rule}_text[max_tokens={self.tokens}]: {ANY_TEXT}"]


class ReasoningFormat(msgspec.Struct, frozen=True):
    begin: str
    end: str

    def start(self, prompt: str) -> ReasoningStart:
        tail = prompt[-200:].rstrip()
        if tail.endswith(self.begin.rstrip()):
            return ReasoningStart.OPEN
        return ReasoningStart.CLOSED if tail.endswith(self.end.rstrip()) else ReasoningStart.FREE

    def tokens(self, token_ids: Sequence[int], start: ReasoningStart, tokenizer: Tokenizer) -> int:
        """Counts an answer's reasoning tokens, marks included."""
        if start is ReasoningStart.CLOSED:
            return 0
        if start is ReasoningStart.FREE:
            head = tokenizer.decode(list(token_ids[:_MARK_TOKENS])).lstrip()
            if not head.startswith(self.begin):
                return 0
        end = tokenizer.token_id(self.end)
        if end is not None:
            return token_ids.index(end) + 1 if end in token_ids else len(token_ids)
        before, found, _ = tokenizer.decode(list(token_ids)).partition(self.end)
        return len(tokenizer.encode(before + found, special=False)) if found else len(token_ids)

    def grammar(self, answer: str, start: ReasoningStart, writer: LarkWriter, bound: Bound | None = None) -> str:
        """Returns a grammar of free reasoning followed by an answer by the given grammar. With a bound, the model does
        reason: otherwise an answer that may be any text could hold reasoning beyond it."""
        if start is ReasoningStart.CLOSED:
            return answer
        thought = "thought"
        if start is ReasoningStart.FREE:
            begin = writer.literal(self.begin)
            if bound is not None and bound.begin_token is not None:
                begin = f"<[{bound.begin_token}]>"
            thought = f"({begin} thought)?" if bound is None else f"{begin} thought"
        rules = [writer.text_until("thought", self.end)] if bound is None else bound.rules("thought")
        return "\n".join([f"start: {thought} {SOME_SPACE} answer", *rules, f"answer: {nested(answer)}"])


class ReasoningReader(CursorReader):
    """Reads reasoning. White space around it belongs to the format. `after` reads the answer; None: the
    answer is text."""

    def __init__(self, marks: ReasoningFormat, start: ReasoningStart, after: AnswerReader | None) -> None:
        super().__init__()
        self._marks = marks
        self._start = start
        self._after = after
        self._space = ""  # white space of the reasoning, held until more reasoning follows
        self._in_answer = False

    def push(self, text: str) -> list[Piece]:
        if self._in_answer:
            return self._answer(text)
        return super().push(text)

    def finish(self, *, cut: bool = False) -> list[Piece]:
        pieces = super().finish(cut=cut)
        return pieces if self._after is None else [*pieces, *self._after.finish(cut=cut)]

    def _answer(self, text: str) -> list[Piece]:
        if self._after is not None:
            return self._after.push(text)
        return [Text(text)] if text else []

    def _read(self) -> Steps[None]:
        cursor = self._cursor
        if self._start is ReasoningStart.FREE:
            yield from self._find_begin()
        if self._start is ReasoningStart.OPEN:
            yield from cursor.skip_space()
            yield from cursor.until((self._marks.end,), self._say)
            yield from cursor.skip_space()
        self._in_answer = True
        self._pieces += self._answer(cursor.take(len(cursor.rest)))

    def _find_begin(self) -> Steps[None]:
        cursor, begin = self._cursor, self._marks.begin
        while not cursor.ended:
            there = cursor.rest.lstrip()
            if there.startswith(begin):
                cursor.take(len(cursor.rest) - len(there) + len(begin))
                self._start = ReasoningStart.OPEN
                return
            if not begin.startswith(there):
                return
            yield

    def _say(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._pieces.append(Reasoning(said))
