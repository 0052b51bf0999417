"""A hypothesis strategy for any msgspec type, read off the type itself: a field that is added is tested at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@cache
def values_of(message_type: Any) -> st.SearchStrategy[Any]:
    return _values(inspect.type_info(message_type))


def _values(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            return _structs(cls, fields)
        case inspect.UnionType(types=types):
            return st.one_of([_values(one) for one in types])
        case inspect.ListType(item_type=item):
            return st.lists(_values(item), max_size=3)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=3)
        case inspect.TupleType(item_types=items):
            return st.tuples(*[_values(item) for item in items])
        case inspect.VarTupleType(item_type=item):
            return st.lists(_values(item), max_size=3).map(tuple)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType():
            return TEXT
        case inspect.BytesType():
            return st.binary(max_size=12)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case _:
            raise NotImplementedError(f"a field of type {info}: say here how to make one")


def _structs(cls: type[msgspec.Struct], fields: tuple[inspect.Field, ...]) -> st.SearchStrategy[Any]:
    required = {field.name: _values(field.type) for field in fields if field.required}
    optional = {field.name: _values(field.type) for field in fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: cls(**values))
