"""How one model writes answers: its calls, its reasoning, and who reads them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.router.formats.calls import CallFormat, CallReader, CallWriting
from tandem.router.formats.harmony import (
    HarmonyCalls,
    HarmonyReader,
    after_analysis,
    analysis_tokens,
    on_final_channel,
)
from tandem.router.formats.lark import LarkWriter
from tandem.router.formats.pieces import AnswerReader, ToolSchemas
from tandem.router.formats.reasoning import ReasoningFormat, ReasoningReader, ReasoningStart
from tandem.router.text.tokenizer import Tokenizer


class AnswerFormat(msgspec.Struct, frozen=True):
    """`harmony` takes the place of both others: there the two are messages of one kind."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    harmony: HarmonyCalls | None = None

    @property
    def call_writing(self) -> CallWriting | None:
        return self.harmony or self.calls

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader must see of an answer although it may be a special token."""
        if self.harmony is not None:
            return self.harmony.layout.marks
        reasoning = (self.reasoning.begin.strip(), self.reasoning.end) if self.reasoning is not None else ()
        return (*(self.calls.layout.marks if self.calls is not None else ()), *reasoning)

    def reader(self, prompt: str, tools: ToolSchemas | None) -> AnswerReader | None:
        """`tools` is None where the model may not call. None: the answer is text and nothing else."""
        if self.harmony is not None:
            return HarmonyReader(calls=tools is not None)
        calls = CallReader(self.calls, tools) if self.calls is not None and tools is not None else None
        if self.reasoning is None:
            return calls
        start = self.reasoning.start(prompt)
        return calls if start is ReasoningStart.CLOSED else ReasoningReader(self.reasoning, start, calls)

    def answer_grammar(self, grammar: str, tokenizer: Tokenizer) -> str:
        """The grammar of an answer that is no call, with the marks that it has to have."""
        if self.harmony is None:
            return grammar
        return on_final_channel(grammar, LarkWriter(tokenizer, self.marks))

    def after_reasoning(self, grammar: str, prompt: str, tokenizer: Tokenizer) -> str:
        """A grammar that holds from the reasoning's end on."""
        writer = LarkWriter(tokenizer, self.marks)
        if self.harmony is not None:
            return after_analysis(grammar, writer)
        if self.reasoning is None:
            return grammar
        return self.reasoning.grammar(grammar, self.reasoning.start(prompt), writer)

    def reasoning_tokens(self, token_ids: Sequence[int], prompt: str, tokenizer: Tokenizer) -> int | None:
        """None: nothing is known of how the model reasons."""
        if self.harmony is not None:
            return analysis_tokens(token_ids, tokenizer)
        if self.reasoning is None:
            return None
        return self.reasoning.tokens(token_ids, self.reasoning.start(prompt), tokenizer)
