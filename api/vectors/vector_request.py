"""The requests of POST /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.api.field_table import FieldRefusal, PathFields
from tandem.api.openai.completion_request import Prompts
from tandem.api.openai.fields import CacheSalt, Priority, TruncatePromptTokens

Dimensions = Annotated[
    int, Meta(ge=1, le=2**31 - 1, description="so many of a vector's first numbers, made one long again")
]
NotEmptyText = Annotated[str, Meta(min_length=1)]
Texts = NotEmptyText | Annotated[list[NotEmptyText], Meta(min_length=1)]
TopN = Annotated[int, Meta(ge=1, le=2**31 - 1, description="the best so many; all without it")]


class VectorFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all three take. `null` means the default everywhere."""

    model: str | None = None
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class EmbeddingRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    add_special_tokens: bool | None = None


class ScoreRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One text against one or many, or as many against as many, each with its own."""

    text_1: Texts
    text_2: Texts


class RerankDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: NotEmptyText


class RerankRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    query: NotEmptyText
    documents: Annotated[list[NotEmptyText | RerankDocument], Meta(min_length=1)]
    top_n: TopN | None = None
    return_documents: bool | None = None


_WHOLE_VECTORS = {"dimensions": FieldRefusal("texts are compared by whole vectors")}
FIELDS = (
    PathFields("/v1/embeddings", EmbeddingRequest, refused={"messages": FieldRefusal("send input")}),
    PathFields("/v1/score", ScoreRequest, refused=_WHOLE_VECTORS),
    PathFields("/v1/rerank", RerankRequest, refused=_WHOLE_VECTORS),
)
