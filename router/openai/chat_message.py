"""An assistant's message, from the pieces that its text means: whole, or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tandem.router.formats.pieces import Arguments, CallBegins, Piece, Reasoning, Text, new_call_id


class ChatMessageMaker:
    """One choice's. `reasoning` says whether the client wants to see it."""

    def __init__(self, *, reasoning: bool = True) -> None:
        self._reasoning = reasoning
        self.calls = 0

    def deltas(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    deltas.append({"content": text})
                case Reasoning(text):
                    if self._reasoning:
                        deltas.append({"reasoning_content": text})
                case CallBegins(call_id, name):
                    function = {"name": name, "arguments": ""}
                    call = {
                        "index": self.calls,
                        "id": call_id or new_call_id(),
                        "type": "function",
                        "function": function,
                    }
                    deltas.append({"tool_calls": [call]})
                    self.calls += 1
                case Arguments(text):
                    more = {"index": self.calls - 1, "function": {"arguments": text}}
                    deltas.append({"tool_calls": [more]})
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """An answer that was cut off is not a complete set of calls."""
        return "tool_calls" if self.calls and reason == "stop" else reason


def whole_message(pieces: Sequence[Piece], *, reasoning: bool = True) -> dict[str, Any]:
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: list[dict[str, Any]] = []
    written: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            calls.append(
                {"id": piece.id or new_call_id(), "type": "function", "function": {"name": piece.name}}
            )
            written.append([])
        elif isinstance(piece, Arguments):
            written[-1].append(piece.text)
    for call, arguments in zip(calls, written, strict=True):
        call["function"]["arguments"] = "".join(arguments)
    beside = bool(calls or thought)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if beside and not content.strip() else content,
        "refusal": None,
    }
    if thought and reasoning:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message
