"""POST /v1/chat/completions: the answer, in one piece or as a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tandem.router.openai.answer import AnswerHead, StreamedUsage, event
from tandem.router.openai.chat_request import ChatRequest
from tandem.router.openai.choice import Choice, Delta
from tandem.router.openai.logprobs import chat_logprobs, prompt_logprobs
from tandem.router.openai.pieces import json_pieces
from tandem.router.openai.plan import Plan
from tandem.router.openai.reading import ReadChoice
from tandem.router.openai.tool_calls import ToolCallReader
from tandem.router.openai.usage import usage
from tandem.router.text.tokenizer import Tokenizer

OBJECT = "chat.completion"
CHUNK = "chat.completion.chunk"


def whole_chat(
    head: AnswerHead, plan: Plan, request: ChatRequest, read: Sequence[ReadChoice], tokenizer: Tokenizer
) -> Iterator[bytes]:
    """In pieces: an answer may be larger than what may be made at once."""
    body = {
        **head.fields(OBJECT),
        "choices": (_choice(plan, request, one, tokenizer) for one in read),
        "usage": usage(plan, [one.choice for one in read]),
    }
    if plan.return_token_ids:
        body["prompt_token_ids"] = plan.prompts[0]
    if plan.prompt_logprobs is not None:
        found = read[0].choice.life.prompt_logprobs or []
        body["prompt_logprobs"] = prompt_logprobs(plan.prompts[0], found, tokenizer, plan.prompt_logprobs)
    return json_pieces(body)


def _choice(plan: Plan, request: ChatRequest, one: ReadChoice, tokenizer: Tokenizer) -> dict[str, Any]:
    message, finish_reason = _message(plan, one)
    logprobs = None
    if request.logprobs:
        store = one.choice.life.ledger.logprobs
        logprobs = chat_logprobs(store, one.tokens, tokenizer, request.top_logprobs or 0)
    return {
        "index": one.choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        **({"token_ids": one.choice.token_ids} if plan.return_token_ids else {}),
    }


def _message(plan: Plan, one: ReadChoice) -> tuple[dict[str, Any], str | None]:
    message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
    if plan.tool_format is None:
        return message, one.choice.finish_reason
    reader = ToolCallReader(plan.tool_format)
    pieces = reader.push(one.text) + reader.finish()
    calls = [piece.call.shown() for piece in pieces if piece.call is not None]
    if not calls:
        return message, one.choice.finish_reason
    text = "".join(piece.text for piece in pieces)
    message |= {"content": text if text.strip() else None, "tool_calls": calls}
    return message, _reason_with_calls(one.choice.finish_reason)


def _reason_with_calls(reason: str | None) -> str | None:
    """An answer that was cut off is not a complete set of calls."""
    return "tool_calls" if reason == "stop" else reason


class ChatStream:
    """The event that most tokens are is put together from two prepared halves."""

    def __init__(
        self,
        head: AnswerHead,
        plan: Plan,
        request: ChatRequest,
        choices: Sequence[Choice],
        tokenizer: Tokenizer,
    ) -> None:
        self._head = head
        self._request = request
        self._tokenizer = tokenizer
        self._usage = StreamedUsage(request.stream_options, plan, choices)
        opening = msgspec.json.encode(head.fields(CHUNK))[:-1]
        self._before = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (opening, choice.index)
            for choice in choices
        ]
        self._after = b'},"logprobs":null,"finish_reason":null}]%b}\n\n' % self._usage.null
        self._begun: set[int] = set()
        self._readers = (
            {c.index: ToolCallReader(plan.tool_format, streams=True) for c in choices}
            if plan.tool_format
            else {}
        )

    def events(self, choice: Choice, delta: Delta) -> bytes:
        out = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            out = self._event(choice, {"role": "assistant", "content": ""})
        if (reader := self._readers.get(choice.index)) is not None:
            return out + self._with_calls(choice, delta, reader)
        if delta.tokens or self._usage.continuous:
            if delta.text or delta.tokens:
                out += self._event(choice, {"content": delta.text}, delta=delta)
        elif delta.text:
            out += self._before[choice.index] + msgspec.json.encode(delta.text) + self._after
        if delta.finish_reason is not None:
            out += self._event(choice, {}, finish_reason=delta.finish_reason)
        return out

    def _with_calls(self, choice: Choice, delta: Delta, reader: ToolCallReader) -> bytes:
        """Logprobs belong to tokens, so they come with them, whether or not their text is held back."""
        out = b""
        number = reader.found_calls - 1
        pieces = reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.finish()
        if delta.tokens:
            out += self._event(choice, {}, delta=delta)
        for piece in pieces:
            if piece.call is not None:
                number += 1
                out += self._event(choice, {"tool_calls": [{"index": number, **piece.call.shown()}]})
            elif piece.arguments:
                more = {"index": number, "function": {"arguments": piece.arguments}}
                out += self._event(choice, {"tool_calls": [more]})
            else:
                out += self._event(choice, {"content": piece.text})
        if delta.finish_reason is not None:
            reason = _reason_with_calls(delta.finish_reason) if reader.found_calls else delta.finish_reason
            out += self._event(choice, {}, finish_reason=reason)
        return out

    def _event(
        self,
        choice: Choice,
        content: dict[str, Any],
        *,
        delta: Delta | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        logprobs = None
        if delta is not None and delta.tokens:
            store, top = choice.life.ledger.logprobs, self._request.top_logprobs or 0
            logprobs = chat_logprobs(store, delta.tokens, self._tokenizer, top).joined()
        entry = {
            "index": choice.index,
            "delta": content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return event({**self._head.fields(CHUNK), "choices": [entry], **self._usage.field()})

    def closing(self) -> bytes:
        return self._usage.closing(self._head.fields(CHUNK)) + b"data: [DONE]\n\n"
