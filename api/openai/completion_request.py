"""The request of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tandem.api.field_table import FieldRefusal, PathFields
from tandem.api.openai.fields import Choices, MaxTokens, SamplingFields, TokenId

PromptTokens = Annotated[list[TokenId], Meta(min_length=1)]
# A string, a list of strings, one list of token ids, or several lists. `prompts_of` tells them apart.
Prompts = str | Annotated[list[str | TokenId | PromptTokens], Meta(min_length=1)]

# Base64 of a tensor's file, or a list of these. `prompt_embeds` reads them.
GivenEmbeds = str | Annotated[list[str], Meta(min_length=1)]


CompletionLogprobs = Annotated[int, Meta(ge=0, le=20)]
CompletionMaxTokens = Annotated[int, Meta(ge=0, le=2**31 - 1, description="0 only with echo")]


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Prompts | None = None
    prompt_embeds: GivenEmbeds | None = None
    max_tokens: CompletionMaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None  # load generators send both names
    logprobs: CompletionLogprobs | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: str | None = None


_NO_REASONING = "a text is completed without the chat template, so without its reasoning"
FIELDS = PathFields(
    "/v1/completions",
    CompletionRequest,
    generates=True,
    refused={
        "messages": FieldRefusal("send prompt, or a chat to /v1/chat/completions"),
        "max_completion_tokens": FieldRefusal("use max_tokens"),
        "max_output_tokens": FieldRefusal("use max_tokens"),
        "stop_sequences": FieldRefusal("use stop"),
        "top_logprobs": FieldRefusal("logprobs is their number in a completion", (0,)),
    },
    accepted={
        "reasoning_effort": _NO_REASONING,
        "include_reasoning": _NO_REASONING,
        "enable_thinking": _NO_REASONING,
        "thinking": _NO_REASONING,
        "prompt_cache_key": "use the header x-session-id",
    },
)
