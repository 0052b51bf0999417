"""From a JSON object to a typed request, or an InvalidRequest that names the field and what it must be."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tandem.router.config import UnknownFields
from tandem.router.openai.fields import ACCEPTED, INTERNAL, REFUSED
from tandem.wire.errors import InvalidRequest

R = TypeVar("R", bound=msgspec.Struct)

_UNKNOWN = re.compile(
    r"^Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL
)
_MISSING = re.compile(
    r"^Object missing required field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL
)
_AT = re.compile(r"^(?P<what>.*) - at `(?:key in )?\$\.?(?P<path>.*)`$", re.DOTALL)


def read_request(
    body: Mapping[str, Any], request_type: type[R], unknown_fields: UnknownFields
) -> tuple[R, list[str]]:
    """The request, and the fields that were ignored because this server does not know them."""
    try:
        return msgspec.convert(body, request_type), []
    except msgspec.ValidationError:
        pass  # a field that it has not, which may be ignored or not, or a mistake that is to be explained
    fields = _fields_of(request_type)
    known: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if name in INTERNAL:
            raise InvalidRequest(f"{name}: internal to the server, not accepted from a client", name)
        if name in fields:
            known[name] = value
        elif name in REFUSED and value not in (None, False):
            raise InvalidRequest(f"{name}: not supported; {REFUSED[name]}", name)
        elif name not in ACCEPTED and name not in REFUSED:
            if unknown_fields is UnknownFields.REFUSE:
                raise InvalidRequest(f"{name}: unknown field", name)
            ignored.append(name)
    try:
        return msgspec.convert(known, request_type), ignored
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


@functools.cache
def _fields_of(request_type: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(request_type.__struct_encode_fields__)


def _explain(text: str) -> InvalidRequest:
    if match := _UNKNOWN.match(text):
        name = _join(match["path"], match["field"])
        return InvalidRequest(f"{name}: unknown field", name)
    if match := _MISSING.match(text):
        name = _join(match["path"], match["field"])
        return InvalidRequest(f"{name}: is required", name)
    if match := _AT.match(text):
        what = match["what"]
        return InvalidRequest(f"{match['path']}: {what[0].lower()}{what[1:]}", match["path"])
    return InvalidRequest(text)


def _join(path: str | None, field: str) -> str:
    return f"{path}.{field}" if path else field
