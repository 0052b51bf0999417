"""What all requests of a run have in common."""

from __future__ import annotations

import enum

import msgspec


class Endpoint(enum.StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Endpoint.COMPLETIONS else "/v1/chat/completions"


class RequestShape(msgspec.Struct, frozen=True):
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    ignore_eos: bool = True  # so that an answer has exactly the tokens asked for
    temperature: float | None = None  # None: the server's default
    timeout_s: float = 600.0
