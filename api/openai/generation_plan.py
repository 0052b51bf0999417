"""What a request generates, how its choices are read, and what they used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.api.answer_format import AnswerFormat
from tandem.api.lives import ReadableLives
from tandem.api.openai.answer import AnswerHead, Choice, event
from tandem.api.openai.fields import StreamOptions
from tandem.api.pieces import AnswerReader, NotesCalls, ToolSchemas
from tandem.api.sequence import SequenceSpec
from tandem.api.text.tokenizer import Tokenizer


class ChatReading(msgspec.Struct, frozen=True):
    format: AnswerFormat
    prompt: str
    tools: ToolSchemas | None  # None when the model may not call tools
    must_call: bool  # the grammar allows calls alone
    # Filled with the tools that a turn of a job calls, while its answer is read. None: not such a turn, or not read for calls.
    called: list[str] | None

    def reader(self) -> AnswerReader | None:
        reader = self.format.reader(self.prompt, self.tools, must_call=self.must_call)
        return NotesCalls(reader, self.called) if reader is not None and self.called is not None else reader

    def reasoning_tokens(self, choices: Sequence[Choice]) -> int | None:
        """Counts the reasoning tokens of the choices; None when the model's reasoning format is unknown."""
        total = 0
        for choice in choices:
            count = self.format.reasoning_tokens(choice.token_ids, self.prompt, choice.tokenizer)
            if count is None:
                return None
            total += count
        return total


class GenerationPlan(msgspec.Struct, frozen=True):
    """What a request generates, and how its answer is shown."""

    specs: list[SequenceSpec]  # prompt by prompt, each with all its choices
    prompt_texts: Sequence[str]  # the echoed prompts; "" without echo
    choices_per_prompt: int  # choices that are generated
    keep: int  # choices that are shown; fewer with best_of
    stops: list[str]
    show_logprobs: bool
    include_stop: bool
    skip_special: bool
    prompt_logprobs: int | None = None  # how many alternatives of each prompt token are shown
    return_token_ids: bool = False
    chat: ChatReading | None = None
    include_usage: bool = False  # a stream ends with it though the request does not ask
    only_echo: bool = False  # with max_tokens 0, the one token that a node always generates is not shown

    def choices(self, generation: ReadableLives, tokenizer: Tokenizer) -> list[Choice]:
        return [
            Choice(
                index,
                life,
                tokenizer,
                self.stops,
                include_stop=self.include_stop,
                skip_special=self.skip_special,
                shown_marks=self.chat.format.marks if self.chat is not None else (),
                show_logprobs=self.show_logprobs,
                show_token_ids=self.return_token_ids,
                text_offset=len(self.prompt_texts[index // self.choices_per_prompt]),
            )
            for index, life in enumerate(generation.lives)
        ]

    @property
    def called(self) -> list[str] | None:
        return self.chat.called if self.chat is not None else None

    def reader(self) -> AnswerReader | None:
        """Returns the reader of one choice's text, or None when the text is shown as it is."""
        return self.chat.reader() if self.chat is not None else None

    def usage(self, choices: Sequence[Choice], *, at_end: bool = True) -> dict[str, Any]:
        """Counts each prompt once, however many choices it has, and every generated token, also those of
        choices that best_of dropped. Reasoning is counted only at the end, because all tokens are looked at for it."""
        completion = 0 if self.only_echo else sum(choice.completion_tokens for choice in choices)
        cached = sum(
            choices[first].life.cached_tokens or 0 for first in range(0, len(choices), self.choices_per_prompt)
        )
        prompts = self.prompt_tokens
        figures: dict[str, Any] = {
            "prompt_tokens": prompts,
            "completion_tokens": completion,
            "total_tokens": prompts + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if at_end and self.chat is not None and (reasoning := self.chat.reasoning_tokens(choices)) is not None:
            figures["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return figures

    @property
    def prompts(self) -> list[list[int]]:
        return [spec.facts.prompt_token_ids for spec in self.specs[:: self.choices_per_prompt]]

    def shown_prompt(self, index: int) -> list[int]:
        """Returns one prompt's tokens; an empty list for a prompt of embeddings."""
        facts = self.specs[index * self.choices_per_prompt].facts
        return [] if facts.embeds is not None else facts.prompt_token_ids

    @property
    def prompt_tokens(self) -> int:
        first = len(self.specs[0].facts.prompt_token_ids)
        if len(self.specs) == self.choices_per_prompt:
            return first
        return sum([len(spec.facts.prompt_token_ids) for spec in self.specs[:: self.choices_per_prompt]])


class AnswerParts(msgspec.Struct, frozen=True):
    """What an answer is written of, whichever API it belongs to."""

    head: AnswerHead
    plan: GenerationPlan
    request: Any
    choices: list[Choice]
    tokenizer: Tokenizer


class StreamedUsage:
    """Implements `stream_options.include_usage`: null in every event, and the figures in an event of their
    own at the end."""

    def __init__(self, parts: AnswerParts) -> None:
        options: StreamOptions | None = parts.request.stream_options
        self._included = parts.plan.include_usage or bool(options and options.include_usage)
        self.continuous = self._included and bool(options and options.continuous_usage_stats)
        self._plan = parts.plan
        self._choices = parts.choices
        self.null = b',"usage":null' if self._included else b""

    def field(self) -> dict[str, Any]:
        if self.continuous:
            return {"usage": self._plan.usage(self._choices, at_end=False)}
        return {"usage": None} if self._included else {}

    def closing(self, head: Mapping[str, Any]) -> bytes:
        if not self._included:
            return b""
        return event({**head, "choices": [], "usage": self._plan.usage(self._choices)})
