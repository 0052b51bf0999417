"""Draws JSON schemas that have instances, all short enough for a random model to write."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_names = st.text(alphabet='abcé "\\', min_size=1, max_size=4)
_values = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=4))


def _integers() -> st.SearchStrategy[Schema]:
    return st.tuples(st.integers(-50, 50), st.integers(0, 60)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    )


def _strings() -> st.SearchStrategy[Schema]:
    bounded = st.tuples(st.integers(0, 4), st.integers(0, 6)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
    )
    patterned = st.sampled_from(["^[a-c]{1,3}$", "^x(y|z)$", "^[0-9]{4}-[0-9]{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    )
    dated = st.sampled_from(["date", "ipv4", "uuid"]).map(lambda name: {"type": "string", "format": name})
    return st.one_of(bounded, patterned, dated)


_leaves = st.one_of(
    _integers(),
    _strings(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    _values.map(lambda value: {"const": value}),
    st.lists(_values, min_size=1, max_size=4).map(lambda values: {"enum": values}),
)


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def with_required(properties: dict[str, Schema]) -> st.SearchStrategy[Schema]:
        names = sorted(properties)
        return st.lists(st.sampled_from(names), unique=True).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        )

    return st.dictionaries(_names, inner, min_size=1, max_size=3).flatmap(with_required)


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda found: {"type": "array", "items": found[0], "minItems": found[1], "maxItems": found[1] + found[2]}
    )


schemas: st.SearchStrategy[Schema] = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        _objects(inner), _arrays(inner), st.lists(inner, min_size=1, max_size=2).map(lambda few: {"anyOf": few})
    ),
    max_leaves=5,
)
