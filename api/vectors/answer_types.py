"""The answers for vectors, scores and rankings, for the API document."""

from __future__ import annotations

from typing import Literal

import msgspec


class PromptUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 of float32, the lowest byte first


class EmbeddingList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class RankedText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RankedDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: int  # in the request
    relevance_score: float
    document: RankedText | None = None


class Ranking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage
