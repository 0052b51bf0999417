"""The paths whose bodies are read, and what each does with each field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from tandem.api.field_table import FieldRefusal, FieldTable, PathFields
from tandem.api.openai import chat_request, prompts, text_request
from tandem.api.openai.vector_request import EmbeddingRequest, RerankRequest, ScoreRequest
from tandem.api.responses import responses_request
from tandem.base.wings import find_wings

_WHOLE_VECTORS = {"dimensions": FieldRefusal("texts are compared by whole vectors")}

# Modules of wings of `api`, each with the `FIELDS` of its paths.
_WINGS = ("tandem.api.anthropic.messages_request",)

FIELDS = FieldTable(
    (
        chat_request.FIELDS,
        prompts.FIELDS,
        responses_request.FIELDS,
        *(row for module in find_wings(_WINGS) for row in cast("Iterable[PathFields]", module.FIELDS)),
        *text_request.FIELDS,
        PathFields("/v1/embeddings", EmbeddingRequest, refused={"messages": FieldRefusal("send input")}),
        PathFields("/v1/score", ScoreRequest, refused=_WHOLE_VECTORS),
        PathFields("/v1/rerank", RerankRequest, refused=_WHOLE_VECTORS),
    )
)
