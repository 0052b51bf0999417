"""Values of calls that are not written as JSON, and the grammars for writing them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from tandem.api.formats.json_scan import json_text, json_value
from tandem.api.lark import MAX_GRAMMAR, json_schema
from tandem.api.pieces import ToolSchemas
from tandem.base.errors import InvalidRequest

_WORDS = {"true": True, "false": False, "null": None, "none": None, "True": True, "False": False, "None": None}


def schema_of(tools: ToolSchemas, name: str, key: str) -> Mapping[str, Any]:
    properties = tools.get(name, {}).get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a schema allows only text. Such a value is written as it is, without quotes."""
    kinds = schema.get("type")
    if kinds is None and (options := schema.get("anyOf") or schema.get("oneOf")):
        return all(_is_text_or_null(option) for option in options) and any(map(_has_text, options))
    if kinds is None and (choices := schema.get("enum")):
        return all(isinstance(choice, str) for choice in choices)
    return kinds == "string" or (isinstance(kinds, list) and set(kinds) <= {"string", "null"} and "string" in kinds)


def _is_text_or_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and (schema.get("type") == "null" or is_text(schema))


def _has_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") != "null"


def escaped(text: str) -> str:
    """Returns the text as it is written within a JSON string."""
    return json_text(text)[1:-1]


def as_json(text: str) -> str:
    """Converts a value that is not text by its schema, or has no schema: JSON or a Python literal, otherwise
    text."""
    text = text.strip()
    if text in _WORDS:
        return json_text(_WORDS[text])
    value = json_value(text)
    if value is not None:
        return text
    try:
        return json_text(_plain(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return json_text(text)


def _plain(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_plain(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_plain(k)) if k is not None else "": _plain(v) for k, v in zip(keys, values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON")
    return value


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Returns the parameters in their order: name, schema, whether it is required. Raises InvalidRequest where a grammar would
    become too long, because it has the definitions again with each of them."""
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    wanted = set(required) if isinstance(required, list) else set()
    found = [
        (str(key), dict(value) if isinstance(value, Mapping) else {}, key in wanted)
        for key, value in properties.items()
    ]
    count = sum(not is_text(declared) for _, declared, _ in found)
    if (definitions := _definitions_of(schema)) and count * len(json_text(definitions)) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"tools: the definitions of a tool's parameters, once for each of the {count} that may refer to them, have more than the "
            f"{MAX_GRAMMAR} characters of a grammar",
            "tools",
        )
    return found


def _definitions_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def value_schema(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one parameter's schema together with the definitions that it may refer to."""
    return {**_definitions_of(whole), **schema}


def json_rule(schema: Mapping[str, Any], *, lenient: bool) -> str:
    return f"%json {json_schema(dict(schema), lenient=lenient)}"
