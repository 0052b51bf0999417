"""How one model writes answers: the formats of its calls and its reasoning, and the readers of both."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.api.answer_format import CallsAsked
from tandem.api.formats.call_grammar import CallGrammar
from tandem.api.formats.calls import CallFormat, CallReader, CallWriting
from tandem.api.formats.harmony import HarmonyCalls, HarmonyReader, after_analysis, analysis_tokens, on_final_channel
from tandem.api.formats.reasoning import Bound, ReasoningFormat, ReasoningReader, ReasoningStart
from tandem.api.lark import LarkWriter
from tandem.api.pieces import AnswerReader, ToolSchemas
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import InvalidRequest


class ModelFormat(msgspec.Struct, frozen=True):
    """A model's formats. `harmony` replaces both others: there calls and reasoning are messages of one
    kind."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    harmony: HarmonyCalls | None = None

    @property
    def call_writing(self) -> CallWriting | None:
        return self.harmony or self.calls

    @property
    def reads_calls(self) -> bool:
        return self.call_writing is not None

    @property
    def marks(self) -> tuple[str, ...]:
        if self.harmony is not None:
            return self.harmony.layout.marks
        reasoning = (self.reasoning.begin.strip(), self.reasoning.end) if self.reasoning is not None else ()
        return (*(self.calls.layout.marks if self.calls is not None else ()), *reasoning)

    def reader(self, prompt: str, tools: ToolSchemas | None, *, must_call: bool = False) -> AnswerReader | None:
        if self.harmony is not None:
            return HarmonyReader(calls=tools is not None, must_call=must_call)
        calls: AnswerReader | None = None
        if self.calls is not None and tools is not None:
            calls = CallReader(self.calls, tools, must_call=must_call)
        if self.reasoning is None:
            return calls
        start = self.reasoning.start(prompt)
        return calls if start is ReasoningStart.CLOSED else ReasoningReader(self.reasoning, start, calls)

    def answer_grammar(self, grammar: str, tokenizer: Tokenizer) -> str:
        if self.harmony is None:
            return grammar
        return on_final_channel(grammar, LarkWriter(tokenizer, self.marks))

    def calls_grammar(self, asked: CallsAsked, answer: str | None, tokenizer: Tokenizer) -> str | None:
        writing = self.call_writing
        strict = any(tool.strict for tool in asked.tools) and self.harmony is None
        if writing is None or not (asked.must or answer is not None or strict or asked.any_answer):
            return None
        grammars = CallGrammar(writing, asked.tools, tokenizer, once=asked.once)
        if asked.must:
            return grammars.must_call()
        return grammars.call_or(answer) if answer is not None else grammars.text_with_calls()

    def bounds_reasoning(self, prompt: str, tokenizer: Tokenizer) -> bool:
        if self.harmony is None and (self.reasoning is None or self.reasoning.start(prompt) is ReasoningStart.CLOSED):
            return False
        if self.reasoning is None or tokenizer.token_id(self.reasoning.end) is None:
            raise InvalidRequest(
                "a budget needs a model that ends its reasoning by a token of its own; use reasoning_effort or max_tokens"
            )
        return True

    def after_reasoning(self, grammar: str, prompt: str, tokenizer: Tokenizer, budget: int | None = None) -> str:
        writer = LarkWriter(tokenizer, self.marks)
        if self.harmony is not None:
            return after_analysis(grammar, writer)
        if self.reasoning is None:
            return grammar
        end = tokenizer.token_id(self.reasoning.end) if budget is not None else None
        begin = tokenizer.token_id(self.reasoning.begin)
        bound = Bound(budget, end, begin) if budget is not None and end is not None else None
        return self.reasoning.grammar(grammar, self.reasoning.start(prompt), writer, bound)

    def reasoning_tokens(self, token_ids: Sequence[int], prompt: str, tokenizer: Tokenizer) -> int | None:
        if self.harmony is not None:
            return analysis_tokens(token_ids, tokenizer)
        if self.reasoning is None:
            return None
        return self.reasoning.tokens(token_ids, self.reasoning.start(prompt), tokenizer)
