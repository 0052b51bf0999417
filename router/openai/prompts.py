"""POST /v1/completions: the request, and prompts as requests give them: text or token ids, one or several."""

from __future__ import annotations

from typing import Annotated, cast

from msgspec import Meta

from tandem.router.openai.fields import Choices, SamplingFields, TokenId
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.errors import ContextLengthExceeded, InvalidRequest

PromptTokens = Annotated[list[TokenId], Meta(min_length=1)]
# A string, a list of strings, one list of token ids, or several: `prompts_of` tells them apart.
Prompts = str | Annotated[list[str | TokenId | PromptTokens], Meta(min_length=1)]

# Base64 of a tensor's file, or several: `prompt_embeds` reads them.
GivenEmbeds = str | Annotated[list[str], Meta(min_length=1)]


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


class PromptTooLong(ContextLengthExceeded):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def prompts_of(given: Prompts | None, param: str) -> list[str | list[int]]:
    """One entry per prompt: text, or token ids. Raises InvalidRequest for a mixture."""
    if given is None:
        raise InvalidRequest(f"{param}: is missing", param)
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
        return cast("list[str | list[int]]", given)
    if all(isinstance(item, int) for item in given):
        return [cast("list[int]", given)]
    raise InvalidRequest(
        f"{param}: must be text, or token ids, or a list of one of them, not a mixture", param
    )


async def prompt_ids(
    prompt: str | list[int], param: str, tokenizer: Tokenizer, context: int | None, *, special: bool
) -> list[int]:
    if isinstance(prompt, str):
        ids = await encoded(prompt, param, tokenizer, context, special=special)
        if not ids:
            raise InvalidRequest(f"{param}: must not be empty", param)
        return ids
    unknown = tokenizer.first_unknown(prompt)
    if unknown is not None:
        size = tokenizer.vocab_size
        raise InvalidRequest(f"{param}: token id {unknown} is outside the vocabulary of {size} tokens", param)
    return prompt


async def encoded(
    text: str, param: str, tokenizer: Tokenizer, context: int | None, *, special: bool
) -> list[int]:
    """What cannot fit into the context is not tokenized to find out by how much. `context` is None where any length may come."""
    if context is not None and len(text) > tokenizer.most_characters(context):
        raise PromptTooLong(
            f"{param}: {len(text)} characters are more than the model's context of {context} tokens can hold",
            param,
        )
    return await tokenizer.encode_async(text, special=special)


def truncated(
    token_ids: list[int], keep: int | None, max_tokens: int | None, context: int | None
) -> list[int]:
    """The prompt's end: its last `keep` tokens at most, which the request calls `truncate_prompt_tokens`; with -1 as many as leave room for
    an answer."""
    if keep is None or (keep == -1 and context is None):
        return token_ids
    if keep == -1 and context is not None:
        keep = context - max(1, max_tokens or 1)
    if keep < 1:
        raise InvalidRequest(
            "truncate_prompt_tokens: must be at least 1, or -1 with max_tokens that leave room for a prompt",
            "truncate_prompt_tokens",
        )
    return token_ids[-keep:]
