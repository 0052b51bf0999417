"""How one model writes its answers: the contract between a chat's plan and the formats of calls and reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tandem.api.pieces import AnswerReader, ToolSchemas
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import InvalidRequest


class OfferedTool(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any]
    strict: bool

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", **self.parameters}


class CallsAsked(msgspec.Struct, frozen=True):
    """What calls an answer may have. `must`: nothing but calls. `once`: at most one. `any_answer`: a grammar is needed, also of
    an answer that may be anything."""

    tools: Sequence[OfferedTool]
    must: bool
    once: bool
    any_answer: bool


class AnswerFormat(Protocol):
    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that a reader must see even though they may be special tokens."""

    @property
    def reads_calls(self) -> bool: ...

    def reader(self, prompt: str, tools: ToolSchemas | None, *, must_call: bool = False) -> AnswerReader | None:
        """Returns a reader of an answer, or None when the answer is only text. `tools`: None when the model
        may not call."""

    def answer_grammar(self, grammar: str, tokenizer: Tokenizer) -> str:
        """Returns the grammar of an answer without calls, with the marks that it must have."""

    def calls_grammar(self, asked: CallsAsked, answer: str | None, tokenizer: Tokenizer) -> str | None:
        """Returns the grammar of calls, or None when the model may write anything. With `answer`, the model calls
        or answers by that grammar.

        Where it may also write text, the grammar holds from where the model begins a call, and only if a tool is strict.
        """

    def bounds_reasoning(self, prompt: str, tokenizer: Tokenizer) -> bool:
        """Whether an answer to the prompt may begin with reasoning. Raises InvalidRequest when its tokens cannot be bounded."""

    def after_reasoning(self, grammar: str, prompt: str, tokenizer: Tokenizer, budget: int | None = None) -> str:
        """Returns a grammar that holds from the reasoning's end on. `budget`: the most tokens of reasoning."""

    def reasoning_tokens(self, token_ids: Sequence[int], prompt: str, tokenizer: Tokenizer) -> int | None:
        """Counts an answer's reasoning tokens; None when the model's reasoning format is unknown."""


class PlainText:
    """The answers of a server that reads no formats."""

    marks: tuple[str, ...] = ()
    reads_calls = False

    def reader(self, prompt: str, tools: ToolSchemas | None, *, must_call: bool = False) -> None:
        return None

    def answer_grammar(self, grammar: str, tokenizer: Tokenizer) -> str:
        return grammar

    def calls_grammar(self, asked: CallsAsked, answer: str | None, tokenizer: Tokenizer) -> str | None:
        return None

    def bounds_reasoning(self, prompt: str, tokenizer: Tokenizer) -> bool:
        raise InvalidRequest("this server tells no reasoning apart (it has no api/formats)")

    def after_reasoning(self, grammar: str, prompt: str, tokenizer: Tokenizer, budget: int | None = None) -> str:
        return grammar

    def reasoning_tokens(self, token_ids: Sequence[int], prompt: str, tokenizer: Tokenizer) -> None:
        return None
