"""The requests of POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.api.field_table import FieldRefusal, PathFields
from tandem.api.lark import JsonObject
from tandem.api.openai.chat_request import ChatMessage, Tool
from tandem.api.openai.fields import TokenId


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    documents: list[JsonObject] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


FIELDS = (
    PathFields(
        "/tokenize",
        TokenizeRequest,
        refused={
            "truncate_prompt_tokens": FieldRefusal("all of a prompt's tokens are listed"),
            "reasoning_effort": FieldRefusal("use chat_template_kwargs"),
            "enable_thinking": FieldRefusal("use chat_template_kwargs"),
            "input": FieldRefusal("use prompt"),
        },
    ),
    PathFields("/detokenize", DetokenizeRequest),
)
