"""Settings that describe themselves: a setting's type says which values it takes, in the operator's words, and what
it is for.

A setting is a field of a frozen struct: `port: Annotated[int, Meta(ge=0, le=65535), about("0 takes a free one")] =
8000`. The type makes the refusal of any other value, the line in `tandem init`'s file and the row in docs/settings.md.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.base.errors import ConfigurationError

STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
LONGEST_S = 1_000_000.0  # far beyond any useful wait, and still safe to add up

Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
# The end of a pattern. In Python `$` alone also matches before a last line break, and a JSON schema has no `\Z`.
END = r"$(?!\n)"
_NOT_EMPTY = r"\S"
NotEmpty = Annotated[str, Meta(pattern=_NOT_EMPTY)]
AtLeastOne = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


def about(description: str) -> Meta:
    """Describes a setting in one or two sentences of Markdown."""
    return Meta(description=description)


def written(pattern: str) -> str:
    """Returns the pattern as people write it."""
    return pattern.replace(END, "$")


def fixed(reason: str) -> Meta:
    """A field that is no setting: it keeps its default, which only code replaces, such as a test. `reason` says in one
    or two sentences of Markdown what it is, and why no one needs another value."""
    return Meta(extra={"fixed": reason})


def fixed_reason(annotation: Any) -> str | None:
    """Returns why the field is fixed, or None for a setting."""
    kind = msgspec.inspect.type_info(annotation)
    extra = kind.extra if isinstance(kind, msgspec.inspect.Metadata) else None
    return (extra or {}).get("fixed")


def description_of(annotation: Any) -> str:
    kind = msgspec.inspect.type_info(annotation)
    extra = kind.extra_json_schema if isinstance(kind, msgspec.inspect.Metadata) else None
    return str((extra or {}).get("description", ""))


@functools.cache
def struct_fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """`msgspec.structs.fields`, which evaluates all annotations of the class each time: milliseconds."""
    return msgspec.structs.fields(kind)


def check_fields(section: msgspec.Struct, name: str) -> None:
    """For a struct's `__post_init__`: checks values from code against the fields' types, as values from a file are.
    Raises ConfigurationError."""
    for field in struct_fields(type(section)):
        value = getattr(section, field.name)
        if isinstance(value, msgspec.Struct):
            continue
        try:
            msgspec.convert(msgspec.to_builtins(value), field.type)
        except msgspec.ValidationError as error:
            sentence = refusal(field.type, value, str(error))
            raise ConfigurationError(f"{name}.{field.name} {sentence}") from None


def without_defaults(value: Any) -> Any:
    """Returns a value with only those fields of its structs that differ from the defaults, to be kept or sent to
    another version, which has its own defaults. Maps, lists and their items stay as they are."""
    if isinstance(value, dict):
        return {key: without_defaults(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_defaults(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    shape = type(value).__struct_config__
    if shape.array_like or shape.tag is not None:
        return value
    given = [(field, getattr(value, field.name)) for field in struct_fields(type(value))]
    return {
        field.encode_name: without_defaults(its_value)
        for field, its_value in given
        if field.required or its_value != _default_of(field)
    }


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


_CONTAINERS = ((list, msgspec.inspect.CollectionType), (dict, msgspec.inspect.DictType))
_OUT_OF_RANGE = re.compile(r"Expected `\w+` (?:[<>]|of length|matching)")


def refusal(annotation: Any, value: object, reason: str) -> str:
    """Returns a sentence that says what a value of this type must be, and what was given. `reason` is msgspec's
    message. The sentence does not repeat a list or mapping, which may hold a key; the reason says where in it the
    mistake is."""
    return refusal_of(_members(msgspec.inspect.type_info(annotation)), value, reason)


def refusal_of(members: Sequence[msgspec.inspect.Type], value: object, reason: str) -> str:
    if any(
        isinstance(value, python) and isinstance(member, kind) for python, kind in _CONTAINERS for member in members
    ):
        inside = next((member.value_type for member in members if isinstance(member, msgspec.inspect.DictType)), None)
        if inside is not None and _OUT_OF_RANGE.match(reason):
            return f"is not right: its values must {_range(_members(inside)[0])}"
        return f"is not right: {reason}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if _OUT_OF_RANGE.match(reason):
        shown = value if isinstance(value, str) and not _is_text(members) else repr(value)
        return f"must {limits_of(members)}, not {_shortened(str(shown))}"
    choices = choices_of(members)
    hint = ""
    if choices and isinstance(value, str):
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
    elif _is_text(members) and isinstance(value, (int, float)):
        hint = "; put it in quotes"
    return f"must be {words_of(members)}, not {_shortened(_shown(value))}{hint}"


def limits_of(members: Sequence[msgspec.inspect.Type]) -> str:
    return " or ".join(filter(None, map(_range, members)))


def words_of(members: Sequence[msgspec.inspect.Type]) -> str:
    return " or ".join(dict.fromkeys(map(_words, members)))


def _shown(value: object) -> str:
    """Never what a list or mapping holds."""
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else repr(value)


def _members(kind: msgspec.inspect.Type) -> Sequence[msgspec.inspect.Type]:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _members(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return [member for one in kind.types for member in _members(one)]
    return (kind,)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _is_text(members: Sequence[msgspec.inspect.Type]) -> bool:
    return any(isinstance(member, msgspec.inspect.StrType) for member in members)


def choices_of(members: Sequence[msgspec.inspect.Type]) -> list[str]:
    """Returns the strings that these types allow."""
    return [choice for member in members for choice in _choices(member)]


def _choices(kind: msgspec.inspect.Type) -> list[str]:
    match kind:
        case msgspec.inspect.EnumType():
            return [str(choice.value) for choice in kind.cls]
        case msgspec.inspect.LiteralType():
            return [str(choice) for choice in kind.values]
        case _:
            return []


def allows_null(annotation: Any) -> bool:
    members = _members(msgspec.inspect.type_info(annotation))
    return any(isinstance(member, msgspec.inspect.NoneType) for member in members)


def kinds_at(annotation: Any, path: str) -> Sequence[msgspec.inspect.Type]:
    """Returns the types that a value may have at `path`, written as in msgspec's messages: `messages[0].role`."""
    kinds = _members(msgspec.inspect.type_info(annotation))
    for step in STEP.findall(path):
        kinds = [member for kind in kinds for member in _inside(kind, step)]
    return kinds


def _inside(kind: msgspec.inspect.Type, step: str) -> Sequence[msgspec.inspect.Type]:
    match kind:
        case msgspec.inspect.StructType():
            return [member for field in kind.fields if field.encode_name == step for member in _members(field.type)]
        case msgspec.inspect.CollectionType():
            return _members(kind.item_type)
        case msgspec.inspect.DictType():
            return _members(kind.value_type)
        case _:
            return ()


def _range(kind: msgspec.inspect.Type) -> str:
    """Returns the limits in words; "" for a type without limits."""
    match kind:
        case msgspec.inspect.StrType(pattern=str(pattern)):
            return "not be empty" if pattern == _NOT_EMPTY else f"be of the form {written(pattern)}"
        case msgspec.inspect.IntType(ge=int(low), le=int(high)) | msgspec.inspect.FloatType(ge=low, le=high) if (
            low is not None and high is not None
        ):
            return f"be from {_written(low)} to {_written(high)}"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            limits = {"above": kind.gt, "at least": kind.ge, "below": kind.lt, "at most": kind.le}
            said = [f"{word} {_written(limit)}" for word, limit in limits.items() if limit is not None]
            return f"be {' and '.join(said)}" if said else ""
        case _:
            return ""


def _written(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.15g}"


def _words(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.EnumType() | msgspec.inspect.LiteralType():
            return "one of " + ", ".join(_choices(kind))
        case msgspec.inspect.CollectionType():
            return "a list"
        case msgspec.inspect.DictType() | msgspec.inspect.StructType():
            return "a mapping"
        case msgspec.inspect.IntType():
            return "a whole number"
        case msgspec.inspect.FloatType():
            return "a number"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.NoneType():
            return "null"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()
