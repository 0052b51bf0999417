"""The answer of POST /v1/chat/completions, whole or as a stream of events. The pieces of an answer's text
(text, reasoning, calls) become an assistant's message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tandem.api.openai.answer import Choice, Delta, PieceReader, event, json_at_once, json_pieces
from tandem.api.openai.chat_request import ChatRequest
from tandem.api.openai.generation_plan import AnswerParts, StreamedUsage
from tandem.api.openai.logprobs import chat_logprobs, prompt_logprobs
from tandem.api.openai.reading import ReadChoice, are_short
from tandem.api.pieces import Arguments, CallBegins, Piece, Reasoning, Text, new_call_id


class ChatMessageMaker:
    """Makes one choice's message deltas from pieces. `reasoning`: whether the client wants to see the
    reasoning."""

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

    def finish_reason(self, reason: str | None, *, cut_call: bool) -> str | None:
        """Returns "tool_calls" if the answer made calls, and neither max_tokens nor a stop string within a call cut it off: then
        it may be an incomplete set of calls."""
        return "tool_calls" if self.calls and reason == "stop" and not cut_call else reason


def whole_message(pieces: Sequence[Piece], *, reasoning: bool = True) -> dict[str, Any]:
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: list[dict[str, Any]] = []
    written: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            calls.append({"id": piece.id or new_call_id(), "type": "function", "function": {"name": piece.name}})
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


OBJECT = "chat.completion"
CHUNK = "chat.completion.chunk"


def whole_chat(parts: AnswerParts, read: Sequence[ReadChoice]) -> bytes | Iterator[bytes]:
    """Writes the whole answer: at once if it is short, as most are, otherwise in pieces."""
    plan = parts.plan
    choices = (_choice(parts, one) for one in read)
    is_short = are_short(plan, read)
    body = {
        **parts.head.fields(OBJECT),
        "choices": list(choices) if is_short else choices,
        "usage": plan.usage([one.choice for one in read]),
    }
    if plan.return_token_ids:
        body["prompt_token_ids"] = plan.prompts[0]
    if plan.prompt_logprobs is not None:
        found = read[0].choice.life.prompt_logprobs or []
        body["prompt_logprobs"] = prompt_logprobs(plan.prompts[0], found, parts.tokenizer, plan.prompt_logprobs)
    return json_at_once(body) if is_short else json_pieces(body)


def _choice(parts: AnswerParts, one: ReadChoice) -> dict[str, Any]:
    message, finish_reason = _message(parts, one)
    request: ChatRequest = parts.request
    logprobs = None
    if request.logprobs:
        store = one.choice.life.ledger.logprobs
        as_ids = bool(request.return_tokens_as_token_ids)
        logprobs = chat_logprobs(store, one.tokens, parts.tokenizer, request.top_logprobs or 0, as_ids=as_ids)
    return {
        "index": one.choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": one.choice.stop_reason,
        **({"token_ids": one.choice.token_ids} if parts.plan.return_token_ids else {}),
    }


def _message(parts: AnswerParts, one: ReadChoice) -> tuple[dict[str, Any], str | None]:
    reader, reason = parts.plan.reader(), one.choice.finish_reason
    if reader is None:
        return {"role": "assistant", "content": one.text, "refusal": None}, reason
    reading = PieceReader(reader)
    pieces = reading.read(Delta(one.text, finish_reason=reason, cut=one.choice.cut))
    message = whole_message(pieces, reasoning=parts.request.include_reasoning is not False)
    called = "tool_calls" in message and reason == "stop" and not reading.cut_call
    return message, "tool_calls" if called else reason


class ChatStream:
    """Writes a stream's events. The common event, one with nothing but text, is put together from two
    prepared halves."""

    def __init__(self, parts: AnswerParts) -> None:
        self._parts = parts
        self._usage = StreamedUsage(parts)
        opening = msgspec.json.encode(parts.head.fields(CHUNK))[:-1]
        self._before = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (opening, choice.index) for choice in parts.choices
        ]
        self._after = b'},"logprobs":null,"finish_reason":null}]%b}\n\n' % self._usage.null
        self._begun: set[int] = set()
        readers = [parts.plan.reader() for _ in parts.choices]
        self._readers = [PieceReader(reader) if reader is not None else None for reader in readers]
        shows = parts.request.include_reasoning is not False
        self._messages = [ChatMessageMaker(reasoning=shows) for _ in parts.choices]

    def events(self, choice: Choice, delta: Delta) -> bytes:
        out = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            out = self._event(choice, {"role": "assistant", "content": ""})
        if (reader := self._readers[choice.index]) is not None:
            return out + self._read(choice, delta, reader)
        if delta.tokens or delta.token_ids or self._usage.continuous:
            if delta.text or delta.tokens or delta.token_ids:
                out += self._event(choice, {"content": delta.text}, delta=delta)
        elif delta.text:
            out += self._before[choice.index] + msgspec.json.encode(delta.text) + self._after
        if delta.finish_reason is not None:
            out += self._event(choice, {}, finish_reason=delta.finish_reason)
        return out

    def _read(self, choice: Choice, delta: Delta, reader: PieceReader) -> bytes:
        """Makes the events of a delta. Log-probabilities and ids are sent with their tokens, even if the text
        is held back."""
        out = b""
        message = self._messages[choice.index]
        pieces = reader.read(delta)
        if delta.tokens or delta.token_ids:
            out += self._event(choice, {}, delta=delta)
        for content in message.deltas(pieces):
            out += self._event(choice, content)
        if delta.finish_reason is not None:
            reason = message.finish_reason(delta.finish_reason, cut_call=reader.cut_call)
            out += self._event(choice, {}, finish_reason=reason)
        return out

    def _event(
        self, choice: Choice, content: dict[str, Any], *, delta: Delta | None = None, finish_reason: str | None = None
    ) -> bytes:
        request, plan, logprobs = self._parts.request, self._parts.plan, None
        if delta is not None and delta.tokens:
            store, top = choice.life.ledger.logprobs, request.top_logprobs or 0
            as_ids = bool(request.return_tokens_as_token_ids)
            logprobs = chat_logprobs(store, delta.tokens, self._parts.tokenizer, top, as_ids=as_ids).joined()
        entry = {"index": choice.index, "delta": content, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            entry["stop_reason"] = choice.stop_reason
        body = {**self._parts.head.fields(CHUNK), "choices": [entry], **self._usage.field()}
        if plan.return_token_ids:
            if delta is not None:
                entry["token_ids"] = delta.token_ids
            elif "role" in content:
                body["prompt_token_ids"] = plan.prompts[0]
        return event(body)

    def closing(self) -> bytes:
        return self._usage.closing(self._parts.head.fields(CHUNK)) + b"data: [DONE]\n\n"
