"""POST /v1/completions: the answer, in one piece or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.router.openai.answer import AnswerHead, StreamedUsage, event
from tandem.router.openai.choice import Choice, Delta, ShownToken
from tandem.router.openai.completion_request import CompletionRequest
from tandem.router.openai.logprobs import completion_logprobs, prompt_logprobs
from tandem.router.openai.plan import Plan
from tandem.router.openai.reading import ReadChoice, keep_best
from tandem.router.openai.usage import usage
from tandem.router.text.tokenizer import Tokenizer

OBJECT = "text_completion"


def whole_completion(
    head: AnswerHead, plan: Plan, request: CompletionRequest, read: Sequence[ReadChoice], tokenizer: Tokenizer
) -> bytes:
    choices: list[dict[str, Any]] = []
    for index, one in enumerate(keep_best(read, plan.choices_per_prompt, plan.keep)):
        prompt = one.choice.index // plan.choices_per_prompt
        shown = [] if plan.only_echo else one.tokens
        extra: dict[str, Any] = {}
        if plan.return_token_ids:
            extra = {"prompt_token_ids": plan.prompts[prompt], "token_ids": one.choice.token_ids}
        if plan.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(
                plan.prompts[prompt], one.choice.life.prompt_logprobs or [], tokenizer, plan.prompt_logprobs
            )
        choices.append(
            {
                "index": index,
                "text": plan.prompt_texts[prompt] + ("" if plan.only_echo else one.text),
                "logprobs": _logprobs(plan, request, one.choice, shown, tokenizer, first=True),
                "finish_reason": "length" if plan.only_echo else one.choice.finish_reason,
                **extra,
            }
        )
    return msgspec.json.encode(
        {**head.fields(OBJECT), "choices": choices, "usage": usage(plan, [one.choice for one in read])}
    )


def _logprobs(
    plan: Plan,
    request: CompletionRequest,
    choice: Choice,
    shown: Sequence[ShownToken],
    tokenizer: Tokenizer,
    *,
    first: bool,
) -> dict[str, Any] | None:
    if request.logprobs is None:
        return None
    echoed: list[Any] = []
    if first and request.echo:
        prompt = plan.prompts[choice.index // plan.choices_per_prompt]
        found = choice.life.prompt_logprobs or []
        echoed = [(token_id, found[at] if at < len(found) else None) for at, token_id in enumerate(prompt)]
    return completion_logprobs(shown, tokenizer, request.logprobs, echoed)


class CompletionStream:
    def __init__(
        self,
        head: AnswerHead,
        plan: Plan,
        request: CompletionRequest,
        choices: Sequence[Choice],
        tokenizer: Tokenizer,
    ) -> None:
        self._head = head
        self._plan = plan
        self._request = request
        self._choices = choices
        self._tokenizer = tokenizer
        self._usage = StreamedUsage(request.stream_options, plan, choices)
        opening = msgspec.json.encode(head.fields(OBJECT))[:-1]
        self._before = [b'data: %b,"choices":[{"index":%d,"text":' % (opening, c.index) for c in choices]
        self._after = b',"logprobs":null,"finish_reason":null}]%b}\n\n' % self._usage.null
        self._begun: set[int] = set()

    def events(self, choice: Choice, delta: Delta) -> bytes:
        first = choice.index not in self._begun
        plain = not delta.tokens and not delta.token_ids and not self._usage.continuous
        if plain and not first and delta.finish_reason is None:
            return self._before[choice.index] + msgspec.json.encode(delta.text) + self._after
        self._begun.add(choice.index)
        text, shown, finish = delta.text, delta.tokens, delta.finish_reason
        if self._plan.only_echo:
            text, shown, finish = "", (), "length" if finish is not None else None
        if first:
            text = self._plan.prompt_texts[choice.index // self._plan.choices_per_prompt] + text
        body = {
            **self._head.fields(OBJECT),
            "choices": [
                {
                    "index": choice.index,
                    "text": text,
                    "logprobs": _logprobs(
                        self._plan, self._request, choice, shown, self._tokenizer, first=first
                    ),
                    "finish_reason": finish,
                    **self._token_ids(choice, delta, first=first),
                }
            ],
            **self._usage.field(),
        }
        return event(body)

    def _token_ids(self, choice: Choice, delta: Delta, *, first: bool) -> dict[str, Any]:
        if not self._plan.return_token_ids:
            return {}
        shown: dict[str, Any] = {"token_ids": delta.token_ids}
        if first:
            shown["prompt_token_ids"] = self._plan.prompts[choice.index // self._plan.choices_per_prompt]
        return shown

    def closing(self) -> bytes:
        return self._usage.closing(self._head.fields(OBJECT)) + b"data: [DONE]\n\n"
