"""The answer of POST /v1/messages, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tandem.api.openai.answer import AnswerHead, Choice, Delta, PieceReader, json_pieces
from tandem.api.openai.generation_plan import AnswerParts, GenerationPlan
from tandem.api.openai.reading import ReadChoice
from tandem.api.pieces import Arguments, CallBegins, Piece, Reasoning, Text, new_call_id


def whole_message(parts: AnswerParts, read: Sequence[ReadChoice]) -> Iterator[bytes]:
    (one,) = read
    whole = Delta(one.text, finish_reason=one.choice.finish_reason, cut=one.choice.cut)
    blocks = _Blocks()
    return json_pieces(
        {
            **_message(parts.head),
            "content": _whole_blocks(blocks, PieceReader(parts.plan.reader()).read(whole)),
            **_end(one.choice, blocks),
            "usage": _usage(parts.plan, one.choice),
        }
    )


def _message(head: AnswerHead) -> dict[str, Any]:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}


def _end(choice: Choice, blocks: _Blocks) -> dict[str, Any]:
    reason: str | None = "max_tokens" if choice.finish_reason == "length" else "end_turn"
    stop = choice.stop_matched
    if stop is not None:
        reason = "stop_sequence"
    elif blocks.called and reason == "end_turn":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(plan: GenerationPlan, choice: Choice) -> dict[str, int]:
    cached = choice.life.cached_tokens or 0
    return {
        "input_tokens": plan.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": choice.completion_tokens,
    }


class _Blocks:
    """Turns pieces into blocks: text, thinking and tool_use. White space alone between blocks is no block."""

    def __init__(self) -> None:
        self.count = 0
        self.called = False
        self._kind = ""
        self._space = ""

    def add(self, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Returns the block that begins with the piece, and what the piece adds to the current block."""
        match piece:
            case CallBegins(call_id, name):
                self.called = True
                return self._begin(
                    {"type": "tool_use", "id": call_id or new_call_id(), "name": name, "input": {}}
                ), None
            case Arguments(text):
                return None, {"type": "input_json_delta", "partial_json": text}
            case Reasoning(text):
                began = None
                if self._kind != "thinking":
                    began = self._begin({"type": "thinking", "thinking": "", "signature": ""})
                return began, {"type": "thinking_delta", "thinking": text}
            case Text(text):
                if self._kind == "text":
                    return None, {"type": "text_delta", "text": text}
                text = self._space + text
                if not text.strip():
                    self._space = text
                    return None, None
                return self._begin({"type": "text", "text": ""}), {"type": "text_delta", "text": text}

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        self._kind, self._space = block["type"], ""
        return block


_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def _whole_blocks(blocks: _Blocks, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    found: list[tuple[dict[str, Any], list[str]]] = []
    for piece in pieces:
        began, added = blocks.add(piece)
        if began is not None:
            found.append((began, []))
        if added is not None:
            found[-1][1].append(added[_FIELDS[added["type"]]])
    return [_closed(block, "".join(written)) for block, written in found]


def _closed(block: dict[str, Any], written: str) -> dict[str, Any]:
    """Returns a finished block. A call's input must be an object, so a cut one is kept in it as text."""
    if block["type"] != "tool_use":
        return {**block, block["type"]: written}
    try:
        return {**block, "input": msgspec.json.decode(written or "{}", type=dict)}
    except msgspec.DecodeError:
        return {**block, "input": {"_incomplete": written}}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


class MessageStream:
    def __init__(self, parts: AnswerParts) -> None:
        self._head = parts.head
        self._plan = parts.plan
        self._reader = PieceReader(parts.plan.reader())
        self._blocks = _Blocks()
        self._begun = False

    def events(self, choice: Choice, delta: Delta) -> bytes:
        out: list[bytes] = []
        if not self._begun:
            self._begun = True
            fields = {**_message(self._head), "content": [], "stop_reason": None, "stop_sequence": None}
            usage = {**_usage(self._plan, choice), "output_tokens": 0}
            out.append(_event("message_start", message={**fields, "usage": usage}))
        for piece in self._reader.read(delta):
            out += self._show(piece)
        if delta.finish_reason is not None:
            out += self._close()
            end, usage = _end(choice, self._blocks), _usage(self._plan, choice)
            out.append(_event("message_delta", delta=end, usage=usage))
        return b"".join(out)

    def _show(self, piece: Piece) -> list[bytes]:
        out: list[bytes] = []
        began, added = self._blocks.add(piece)
        index = self._blocks.count - 1
        if began is not None:
            if index:
                out.append(_event("content_block_stop", index=index - 1))
            out.append(_event("content_block_start", index=index, content_block=began))
        if added is not None:
            out.append(_event("content_block_delta", index=index, delta=added))
        return out

    def _close(self) -> list[bytes]:
        count = self._blocks.count
        return [_event("content_block_stop", index=count - 1)] if count else []

    def closing(self) -> bytes:
        return _event("message_stop")
