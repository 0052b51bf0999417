"""The answers' shapes, for the API document. A test checks every real answer against them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # of models that reason


class CompletionLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None  # the stop string, or the token of stop_token_ids, that ended it
    prompt_token_ids: list[int] = []  # with return_token_ids
    token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []  # with prompt_logprobs


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whole, or as an event of a stream: then `usage` is there only when it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AnswerFunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: AnswerFunctionCall


class FunctionDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first of a call has all of it, the others more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class AnswerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] = []


class TopLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True, forbid_unknown_fields=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    content: list[TokenLogprob]
    refusal: None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] = []  # with return_token_ids


class ChatCompletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []  # with return_token_ids
    prompt_logprobs: PromptLogprobs = []  # with prompt_logprobs


class MessageDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] = []


class ChunkChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None  # with the finish_reason
    token_ids: list[int] = []


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []  # in the first


class ModelCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["ok", "unavailable"]
    reason: str | None = None


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str


class RouterLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server_load: int


class ErrorDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: ErrorDetail


class ClusterDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    router: dict[str, Any]
    pools: list[dict[str, Any]]
    nodes: list[dict[str, Any]]
