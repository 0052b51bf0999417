"""What an answer must follow, as the nodes are told it: one grammar, checked before any node computes anything."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from typing import Annotated, Literal

import msgspec
from llguidance import LLMatcher, regex_to_lark
from msgspec import Meta

from tandem.router.formats.lark import JsonObject, json_schema, quoted
from tandem.wire.errors import InvalidRequest

MAX_GRAMMAR = 256 * 1024
_REMEMBERED = 256
# Checked grammars, and what is wrong with them. Others are checked in a thread, as short as they may be: a schema of a
# few hundred characters can cost a tenth of a second.
_checked: OrderedDict[str, str | None] = OrderedDict()

_SOURCE_LINES = re.compile(r"\n\s+\d+ \|.*", re.DOTALL)
_PLACE = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")

Text = Annotated[str, Meta(min_length=1)]
TextChoice = Annotated[list[Text], Meta(min_length=1, max_length=1024)]
SchemaName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: SchemaName
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None  # the answer follows the schema either way


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of them. `grammar` is Lark, as llguidance reads it."""

    json: JsonObject | None = None
    regex: Text | None = None
    choice: TextChoice | None = None
    grammar: Text | None = None


async def grammar_of_format(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        if wanted is not None and wanted.json_schema is not None:
            raise InvalidRequest(
                "response_format.json_schema: only with type 'json_schema'", "response_format.json_schema"
            )
        return None
    if wanted.type == "json_object":
        return f"start: %json {json_schema({'type': 'object'})}"
    if wanted.json_schema is None:
        raise InvalidRequest("response_format.json_schema: is required", "response_format.json_schema")
    grammar = f"start: %json {json_schema(wanted.json_schema.schema)}"
    await check_grammar(grammar, "response_format.json_schema.schema")
    return grammar


async def grammar_of_structured_outputs(
    wanted: StructuredOutputs | None, param: str = "structured_outputs"
) -> str | None:
    if wanted is None:
        return None
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs: must have one of {', '.join(wanted.__struct_fields__)}",
            "structured_outputs",
        )
    if wanted.json is not None:
        grammar = f"start: %json {json_schema(wanted.json)}"
    elif wanted.regex is not None:
        grammar = f"start: /{_regex(wanted.regex)}/"
    elif wanted.choice is not None:
        grammar = "start: " + " | ".join(map(quoted, wanted.choice))
    else:
        grammar = wanted.grammar or ""
    await check_grammar(grammar, f"{param}.{given[0]}" if param == "structured_outputs" else param)
    return grammar


def _regex(text: str) -> str:
    if "\n" in text:
        text = text.replace("\n", "\\n")
    return regex_to_lark(text, "d")


async def check_grammar(grammar: str, param: str) -> None:
    """Raises InvalidRequest, naming the field, for what no node could compile."""
    if len(grammar) > MAX_GRAMMAR:
        raise InvalidRequest(f"{param}: must be at most {MAX_GRAMMAR} characters long", param)
    if grammar in _checked:
        problem = _checked[grammar]
        _checked.move_to_end(grammar)
    else:
        problem = _checked[grammar] = await asyncio.to_thread(_problem, grammar)
        if len(_checked) > _REMEMBERED:
            _checked.popitem(last=False)
    if problem is not None:
        raise InvalidRequest(f"{param}: {problem}", param)


def _problem(grammar: str) -> str | None:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    if not is_error:
        return None
    plain = _PLACE.sub("", _SOURCE_LINES.sub("", messages[0] if messages else "is no grammar"))
    return _PLACE.sub("", " ".join(plain.split()))[:500]
