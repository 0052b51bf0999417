"""The paths whose bodies are read, and what each does with each field."""

from collections.abc import Iterable
from typing import cast

from tandem.api.field_table import FieldTable, PathFields
from tandem.api.openai import chat_request, completion_request, text_request
from tandem.base.wings import find_wings

# Modules of wings of `api`, each with the `FIELDS` of its paths.
_WINGS = (
    "tandem.api.responses.responses_request",
    "tandem.api.anthropic.messages_request",
    "tandem.api.vectors.vector_request",
)

FIELDS = FieldTable(
    (
        chat_request.FIELDS,
        completion_request.FIELDS,
        *(row for module in find_wings(_WINGS) for row in cast("Iterable[PathFields]", module.FIELDS)),
        *text_request.FIELDS,
    )
)
