"""`tandem config --schema`: the JSON schema of tandem.yaml, by which editors check and explain it.

It says what a file may say; rules between settings (`rules`) are checked by `tandem config` alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.cluster.config import DERIVED, OF_ALL_POOLS, SHORTHANDS, TandemConfig
from tandem.cluster.describe import without_links
from tandem.cluster.settings.names import Path, fields_of, section_type

FILE_NAME = "tandem.schema.json"

_SIZE = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*[kKmMgGtT]?[iI]?[bB]?\s*$"}


def json_schema() -> dict[str, Any]:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tandem.yaml"}
    return {**head, **_section(TandemConfig(), ())}


def _section(section: msgspec.Struct, path: Path) -> dict[str, Any]:
    properties = {
        name: _setting(info.type, getattr(section, name), (*path, name))
        for name, info in fields_of(type(section)).items()
        if (*path, name) not in DERIVED
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _setting(annotation: Any, default: Any, path: Path) -> dict[str, Any]:
    inner = section_type(annotation)
    if inner is not None:
        kinds: list[dict[str, Any]] = [_section(default, path), {"type": "null"}]
        if inner in SHORTHANDS:
            kinds.insert(0, kinds[0]["properties"][SHORTHANDS[inner]])
        return {"anyOf": kinds}
    made = _of_type(annotation)
    description = without_links(made.pop("description", ""))
    if path[0] == "pools" and path[-1] in OF_ALL_POOLS:
        made = _overrides(path[-1])
    elif path == ("cache", "memory_bytes"):
        made = {"anyOf": [made, _SIZE]}
    elif path == ("cache", "tiers"):
        tier = made["items"]["properties"]
        tier |= {name: {"anyOf": [tier[name], _SIZE]} for name in ("cpu", "size")}
    return {"description": description, **made, "default": msgspec.to_builtins(default)}


def _of_type(annotation: Any) -> dict[str, Any]:
    """The schema of a type, without references: editors then show a setting's own description."""
    (made,), parts = msgspec.json.schema_components([annotation], ref_template="{name}")

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined({**parts[value["$ref"]], **{k: v for k, v in value.items() if k != "$ref"}})
        return {name: inlined(each) for name, each in value.items() if name != "title" or isinstance(each, dict)}

    plain: dict[str, Any] = inlined(made)
    return plain


def _overrides(section: str) -> dict[str, Any]:
    """A pool's own settings of a section: those that nodes need not have alike."""
    own = _section(getattr(TandemConfig(), section), (section,))
    properties = {name: made for name, made in own["properties"].items() if name not in OF_ALL_POOLS[section]}
    return {**own, "properties": properties}
