"""The answers' shapes, for the API document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class InputDetails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: str
    message: str


class ResponseAnswer(msgspec.Struct, frozen=True):
    """And what it repeats of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


class InputItems(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a response was asked with."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    object: Literal["response"]
    deleted: bool
