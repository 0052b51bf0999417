"""POST /v1/completions: the request."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tandem.router.openai.fields import Choices, SamplingFields
from tandem.router.openai.prompts import GivenEmbeds, Prompts

CompletionLogprobs = Annotated[int, Meta(ge=0, le=20)]
CompletionMaxTokens = Annotated[int, Meta(ge=0, le=2**31 - 1, description="0 only with echo")]


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Prompts | None = None
    prompt_embeds: GivenEmbeds | None = None
    max_tokens: CompletionMaxTokens | None = None
    logprobs: CompletionLogprobs | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
