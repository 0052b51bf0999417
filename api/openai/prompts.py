"""Prompts that are texts or lists of token ids: told apart, checked and tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tandem.api.openai.completion_request import Prompts
from tandem.api.text.tenant_cache import CacheOwner
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import ContextLengthExceeded, InvalidRequest
from tandem.base.shares import OneAtATime

# Tokenizing more takes about a tenth of a second.
LONG_TEXT = 256 << 10
long_texts = OneAtATime()


class PromptTooLong(ContextLengthExceeded):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def prompts_of(given: Prompts | None, param: str) -> list[str | list[int]]:
    """Returns one entry per prompt: text or token ids. Raises InvalidRequest for a mixture."""
    if given is None:
        raise InvalidRequest(f"{param}: is missing", param)
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))  # a list may have millions of token ids
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", given)
    if kinds == {int}:
        return [cast("list[int]", given)]
    raise InvalidRequest(f"{param}: must be text, or token ids, or a list of one of them, not a mixture", param)


async def prompt_ids(
    prompt: str | list[int], param: str, tokenizer: Tokenizer, context: int | None, *, special: bool, owner: CacheOwner
) -> list[int]:
    if isinstance(prompt, str):
        ids = await encoded(prompt, param, tokenizer, context, special=special, owner=owner)
        if not ids:
            raise InvalidRequest(f"{param}: must not be empty", param)
        return ids
    check_count(prompt, param, context)
    unknown = tokenizer.first_unknown(prompt)
    if unknown is not None:
        size = tokenizer.vocab_size
        raise InvalidRequest(f"{param}: token id {unknown} is outside the vocabulary of {size} tokens", param)
    return prompt


def check_count(token_ids: Sequence[int], param: str, context: int | None) -> None:
    """Refuses more token ids than the context holds before anything looks at them."""
    if context is not None and len(token_ids) > context:
        raise PromptTooLong(
            f"{param}: has {len(token_ids)} tokens, and the model's context is {context}; send at most so many", param
        )


async def encoded(
    text: str, param: str, tokenizer: Tokenizer, context: int | None, *, special: bool, owner: CacheOwner
) -> list[int]:
    """Tokenizes a text. A text that certainly does not fit is refused without tokenizing it. `context`: None
    when any length is allowed."""
    if context is not None and len(text) > (most := tokenizer.most_characters(context)):
        raise too_many_characters(param, f"{len(text)} characters are", context, most)
    if len(text) > LONG_TEXT:
        async with long_texts.turn(owner.tenant):
            return await tokenizer.encode_async(text, special=special, owner=owner)
    return await tokenizer.encode_async(text, special=special, owner=owner)


def too_many_characters(param: str, what: str, context: int, most: int) -> PromptTooLong:
    return PromptTooLong(
        f"{param}: {what} more than the model's context of {context} tokens can hold; send at most {most}", param
    )


def truncated(token_ids: list[int], keep: int | None, max_tokens: int | None, context: int | None) -> list[int]:
    """Returns at most the last `keep` tokens (`truncate_prompt_tokens`); with -1, as many as leave room for
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
