"""gpt-oss's answers: messages on channels, each with a header that names its channel.

`analysis` is reasoning, `final` the answer, `commentary` to a function a call. Text without a header is the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.api.formats.calls import CallSink, Layout
from tandem.api.formats.cursor import CursorReader, Steps
from tandem.api.lark import ANY_TEXT, LarkWriter, json_schema, nested, quoted
from tandem.api.pieces import Reasoning, Text
from tandem.api.text.tokenizer import Tokenizer

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_HEADERS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([\w.\-]+)")


class HarmonyCalls(msgspec.Struct, frozen=True):
    """Calls in harmony. A call ends the answer: its end mark is an end-of-sequence token, so no grammar has
    to name it."""

    begins: tuple[str, ...] = ("<|channel|>commentary to=functions.",)
    opening: str | None = None
    layout: Layout = Layout(marks=MARKS, most=1, last=True)

    def rules(self, rule: str, name: str, schema: dict[str, Any], writer: LarkWriter, *, lenient: bool) -> list[str]:
        head = writer.literal(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
        return [f"{rule}: {head} {rule}_a", f"{rule}_a: %json {json_schema(schema, lenient=lenient)}"]


def on_final_channel(answer: str, writer: LarkWriter) -> str:
    return f"start: {writer.literal('<|channel|>final<|message|>')} answer\nanswer: {nested(answer)}"


def after_analysis(grammar: str, writer: LarkWriter) -> str:
    """Returns a message's grammar with any reasoning before it."""
    analysis = f"{writer.literal('<|channel|>analysis<|message|>')} {ANY_TEXT} {writer.literal('<|end|><|start|>')}"
    assistant = quoted("assistant")
    return "\n".join(
        [f"start: (analysis {assistant})? message", f"analysis: {analysis}", f"message: {nested(grammar)}"]
    )


def analysis_tokens(token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Counts the tokens of an answer's reasoning messages, with their headers and end marks."""
    message = tokenizer.token_id("<|message|>")
    ends = {tokenizer.token_id(mark) for mark in _ENDS}
    count, begin, header_end = 0, 0, -1
    for at, token in enumerate(token_ids):
        if token == message and header_end < begin:
            header_end = at
        elif token in ends and header_end >= begin:
            count += _if_analysis(token_ids, begin, header_end, at + 1, tokenizer)
            begin = at + 1
    return count + (_if_analysis(token_ids, begin, header_end, len(token_ids), tokenizer) if header_end >= begin else 0)


def _if_analysis(token_ids: Sequence[int], begin: int, header_end: int, end: int, tokenizer: Tokenizer) -> int:
    channel = _CHANNEL.search(tokenizer.decode(list(token_ids[begin:header_end])))
    return end - begin if channel is not None and channel[1] == "analysis" else 0


class HarmonyReader(CursorReader):
    def __init__(self, *, calls: bool, must_call: bool = False) -> None:
        super().__init__()
        self._calls = calls
        self._must_call = must_call

    def _read(self) -> Steps[None]:
        cursor = self._cursor
        sink = CallSink(cursor, self._pieces)
        # The prompt ends within a header, which may continue with the message's recipient.
        yield from cursor.skip_space()
        mark: str | None = ""
        if not (yield from cursor.starts_with("to=")):
            mark = yield from cursor.until(_HEADERS, self._text)
        while mark is not None:
            header: list[str] = [mark]
            if (yield from cursor.until(("<|message|>",), header.append)) is None:
                return
            head = "".join(header)
            ended = yield from self._read_message(head, sink)
            if ended is None:
                return
            mark = ended if ended == "<|start|>" else (yield from cursor.until(_HEADERS, self._text))

    def _read_message(self, head: str, sink: CallSink) -> Steps[str | None]:
        channel = _CHANNEL.search(head)
        function = _FUNCTION.search(head)
        say = self._text
        if channel is not None and channel[1] == "analysis":
            say = self._reasoning
        elif function is not None and self._calls:
            sink.call(function[1])
            say = sink.arguments
        return (yield from self._cursor.until(_ENDS, say))

    def _text(self, text: str) -> None:
        if self._must_call:
            return
        self._pieces.append(Text(text))

    def _reasoning(self, text: str) -> None:
        self._pieces.append(Reasoning(text))
