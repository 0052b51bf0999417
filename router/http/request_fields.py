"""The paths whose bodies are read, and what each does with each field."""

from __future__ import annotations

from tandem.api.anthropic import messages_request
from tandem.api.field_table import FieldRefusal, FieldTable, PathFields
from tandem.api.openai import chat_request, completion_request, text_request
from tandem.api.openai.vector_request import EmbeddingRequest, RerankRequest, ScoreRequest
from tandem.api.responses import responses_request

_WHOLE_VECTORS = {"dimensions": FieldRefusal("texts are compared by whole vectors")}

FIELDS = FieldTable(
    (
        chat_request.FIELDS,
        completion_request.FIELDS,
        responses_request.FIELDS,
        *messages_request.FIELDS,
        *text_request.FIELDS,
        PathFields("/v1/embeddings", EmbeddingRequest, refused={"messages": FieldRefusal("send input")}),
        PathFields("/v1/score", ScoreRequest, refused=_WHOLE_VECTORS),
        PathFields("/v1/rerank", RerankRequest, refused=_WHOLE_VECTORS),
    )
)
