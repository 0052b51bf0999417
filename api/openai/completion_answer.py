"""The answer of POST /v1/completions, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tandem.api.openai.answer import Choice, Delta, RawPieces, event, json_at_once, json_pieces
from tandem.api.openai.completion_request import CompletionRequest
from tandem.api.openai.generation_plan import AnswerParts, StreamedUsage
from tandem.api.openai.logprobs import completion_logprobs, prompt_logprobs
from tandem.api.openai.reading import ReadChoice, are_short, keep_best
from tandem.wire.sampling import TokenLogprobs

OBJECT = "text_completion"


def whole_completion(parts: AnswerParts, read: Sequence[ReadChoice]) -> bytes | Iterator[bytes]:
    """Writes the whole answer: at once if it is short, as most are, otherwise in pieces."""
    plan = parts.plan
    kept = keep_best(read, plan.choices_per_prompt, plan.keep)
    choices = (_choice(parts, index, one) for index, one in enumerate(kept))
    is_short = are_short(plan, read)
    body = {
        **parts.head.fields(OBJECT),
        "choices": list(choices) if is_short else choices,
        "usage": plan.usage([one.choice for one in read]),
    }
    return json_at_once(body) if is_short else json_pieces(body)


def _choice(parts: AnswerParts, index: int, one: ReadChoice) -> dict[str, Any]:
    plan = parts.plan
    prompt = one.choice.index // plan.choices_per_prompt
    shown = range(0) if plan.only_echo else one.tokens
    logprobs = _logprobs(parts, one.choice, shown, first=True)
    choice: dict[str, Any] = {
        "index": index,
        "text": plan.prompt_texts[prompt] + ("" if plan.only_echo else one.text),
        "logprobs": logprobs,
        "finish_reason": "length" if plan.only_echo else one.choice.finish_reason,
        "stop_reason": None if plan.only_echo else one.choice.stop_reason,
    }
    if plan.return_token_ids:
        shown_ids = [] if plan.only_echo else one.choice.token_ids
        choice |= {"prompt_token_ids": plan.shown_prompt(prompt), "token_ids": shown_ids}
    if plan.prompt_logprobs is not None:
        found = one.choice.life.prompt_logprobs or []
        choice["prompt_logprobs"] = prompt_logprobs(plan.prompts[prompt], found, parts.tokenizer, plan.prompt_logprobs)
    return choice


def _logprobs(parts: AnswerParts, choice: Choice, shown: range, *, first: bool) -> RawPieces | None:
    request: CompletionRequest = parts.request
    if request.logprobs is None:
        return None
    prompt: Sequence[int] = ()
    found: Sequence[TokenLogprobs | None] = ()
    if first and request.echo:
        prompt = parts.plan.prompts[choice.index // parts.plan.choices_per_prompt]
        found = choice.life.prompt_logprobs or []
    return completion_logprobs(
        choice.life.ledger.logprobs,
        shown,
        choice.offsets,
        parts.tokenizer,
        request.logprobs,
        prompt,
        found,
        as_ids=bool(request.return_tokens_as_token_ids),
    )


class CompletionStream:
    def __init__(self, parts: AnswerParts) -> None:
        self._parts = parts
        self._plan = parts.plan
        self._usage = StreamedUsage(parts)
        opening = msgspec.json.encode(parts.head.fields(OBJECT))[:-1]
        self._before = [b'data: %b,"choices":[{"index":%d,"text":' % (opening, c.index) for c in parts.choices]
        self._after = b',"logprobs":null,"finish_reason":null}]%b}\n\n' % self._usage.null
        self._begun: set[int] = set()

    def events(self, choice: Choice, delta: Delta) -> bytes:
        first = choice.index not in self._begun
        plain = not delta.tokens and not delta.token_ids and not self._usage.continuous
        if plain and not first and delta.finish_reason is None:
            return self._before[choice.index] + msgspec.json.encode(delta.text) + self._after
        self._begun.add(choice.index)
        text, shown, finish, stop = delta.text, delta.tokens, delta.finish_reason, choice.stop_reason
        if self._plan.only_echo:
            text, shown, finish, stop = "", range(0), "length" if finish is not None else None, None
        if first:
            text = self._plan.prompt_texts[choice.index // self._plan.choices_per_prompt] + text
        logprobs = _logprobs(self._parts, choice, shown, first=first)
        body = {
            **self._parts.head.fields(OBJECT),
            "choices": [
                {
                    "index": choice.index,
                    "text": text,
                    "logprobs": logprobs.joined() if logprobs is not None else None,
                    "finish_reason": finish,
                    **({"stop_reason": stop} if finish is not None else {}),
                    **self._token_ids(choice, delta, first=first),
                }
            ],
            **self._usage.field(),
        }
        return event(body)

    def _token_ids(self, choice: Choice, delta: Delta, *, first: bool) -> dict[str, Any]:
        if not self._plan.return_token_ids:
            return {}
        shown: dict[str, Any] = {"token_ids": [] if self._plan.only_echo else delta.token_ids}
        if first:
            shown["prompt_token_ids"] = self._plan.shown_prompt(choice.index // self._plan.choices_per_prompt)
        return shown

    def closing(self) -> bytes:
        return self._usage.closing(self._parts.head.fields(OBJECT)) + b"data: [DONE]\n\n"
