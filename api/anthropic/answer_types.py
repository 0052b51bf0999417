"""The answers' shapes, for the API document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class MessageUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}


class MessageAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_tokens: int


class MessagesErrorDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["error"]
    error: MessagesErrorDetail
