"""POST /v1/chat/completions: the answer, in one piece or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.openai.answer import AnswerHead, StreamedUsage, event
from router.openai.chat_request import ChatRequest
from router.openai.choice import Choice, Delta
from router.openai.logprobs import chat_logprobs
from router.openai.plan import Plan
from router.openai.reading import ReadChoice
from router.openai.usage import usage
from router.text.tokenizer import Tokenizer

OBJECT = "chat.completion"
CHUNK = "chat.completion.chunk"


def whole_chat(
    head: AnswerHead, plan: Plan, request: ChatRequest, read: Sequence[ReadChoice], tokenizer: Tokenizer
) -> bytes:
    choices: list[dict[str, Any]] = []
    for one in read:
        logprobs = (
            chat_logprobs(one.tokens, tokenizer, request.top_logprobs or 0) if request.logprobs else None
        )
        choices.append(
            {
                "index": one.choice.index,
                "message": {"role": "assistant", "content": one.text, "refusal": None},
                "logprobs": logprobs,
                "finish_reason": one.choice.finish_reason,
            }
        )
    return msgspec.json.encode(
        {**head.fields(OBJECT), "choices": choices, "usage": usage(plan, [one.choice for one in read])}
    )


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

    def events(self, choice: Choice, delta: Delta) -> bytes:
        out = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            out = self._event(choice, {"role": "assistant", "content": ""})
        if delta.tokens or self._usage.continuous:
            if delta.text or delta.tokens:
                out += self._event(choice, {"content": delta.text}, delta=delta)
        elif delta.text:
            out += self._before[choice.index] + msgspec.json.encode(delta.text) + self._after
        if delta.finish_reason is not None:
            out += self._event(choice, {}, finish_reason=delta.finish_reason)
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
            logprobs = chat_logprobs(delta.tokens, self._tokenizer, self._request.top_logprobs or 0)
        entry = {
            "index": choice.index,
            "delta": content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return event({**self._head.fields(CHUNK), "choices": [entry], **self._usage.field()})

    def closing(self) -> bytes:
        return self._usage.closing(self._head.fields(CHUNK)) + b"data: [DONE]\n\n"
