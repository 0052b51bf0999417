"""How to sample, and what comes back, by vLLM's names, so that a program for vLLM needs another import and no other change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class LlmSampling:
    """`tandem.SamplingParams`: the fields of vLLM's class of that name that the server has. Its defaults are vLLM's,
    too; without any, the model's own hold. `extra`: further fields of the request (docs/api.md)."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Returns the request's fields. One that is None is left to the server."""
        named = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        extra = named.pop("extra")
        if self.logit_bias is not None:
            named["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return {name: value for name, value in named.items() if value is not None} | dict(extra)


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One answer. `logprobs`: the server's own form, as docs/api.md has it for the path."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: Any = None
    tool_calls: list[dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None for a chat, or a prompt of token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None
    prompt_logprobs: Any = None
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclasses.dataclass(frozen=True)
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    finished: bool = True
