"""One method at one path, as the API document has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.api.openai.answer_types import ErrorBody

GENERATION_ERRORS = ("400", "401", "404", "408", "413", "415", "429", "431", "500", "502", "503", "504")
EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["data", "event"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}

Kind = type[msgspec.Struct]


class ApiOperation(msgspec.Struct, frozen=True):
    method: str
    path: str
    summary: str
    answer: Kind
    request: Kind | None = None
    errors: tuple[str, ...] = GENERATION_ERRORS
    error: Kind = ErrorBody
    event: Kind | Mapping[str, Any] | None = None  # if it streams: OpenAI's delta, or the schema of an event
    example: Mapping[str, Any] | None = None  # the body that its form on /docs begins with

    @property
    def types(self) -> list[Kind]:
        return [each for each in (self.request, self.answer, self.error, self.event) if isinstance(each, type)]

    @property
    def described(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "summary": self.summary,
            "responses": {
                "200": _json(self.answer, "the answer"),
                **{status: _json(self.error, "an error") for status in self.errors},
            },
        }
        if self.request is not None:
            made["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(self.request)}}}
        if self.event is not None:
            schema = _delta(self.event) if isinstance(self.event, type) else self.event
            made["responses"]["200"]["content"]["text/event-stream"] = {"schema": schema}
        if names := re.findall(r"{(\w+)}", self.path):
            text = {"in": "path", "required": True, "schema": {"type": "string"}}
            made["parameters"] = [{"name": name, **text} for name in names]
        return made


def _ref(answer: Kind) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{answer.__name__}"}


def _json(answer: Kind, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(answer)}}}


def _delta(event: Kind) -> dict[str, Any]:
    """Describes an event of OpenAI's streams."""
    return {
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {
                "anyOf": [
                    {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": {"anyOf": [_ref(event), _ref(ErrorBody)]},
                    },
                    {"const": "[DONE]"},
                ],
                "description": "with stream: one of these per event, [DONE] at the end; an error ends it without",
            },
            "event": {"type": "string", "enum": ["message", "error"]},
        },
    }
