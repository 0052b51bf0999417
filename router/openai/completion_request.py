"""POST /v1/completions: the request."""

from __future__ import annotations

from typing import Annotated, cast

from msgspec import Meta

from tandem.router.openai.fields import Choices, SamplingFields, TokenId
from tandem.wire.errors import InvalidRequest

PromptTokens = Annotated[list[TokenId], Meta(min_length=1)]
CompletionLogprobs = Annotated[int, Meta(ge=0, le=20)]
CompletionMaxTokens = Annotated[int, Meta(ge=0, le=2**31 - 1, description="0 only with echo")]


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A string, a list of strings, one list of token ids, or several: `prompts_of` tells them apart.
    prompt: str | Annotated[list[str | TokenId | PromptTokens], Meta(min_length=1)]
    max_tokens: CompletionMaxTokens | None = None
    logprobs: CompletionLogprobs | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """One entry per prompt: text, or token ids. Raises InvalidRequest for a mixture."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return cast("list[str | list[int]]", prompt)
    if all(isinstance(item, int) for item in prompt):
        return [cast("list[int]", prompt)]
    raise InvalidRequest(
        "prompt: must be text, or token ids, or a list of one of them, not a mixture", "prompt"
    )
