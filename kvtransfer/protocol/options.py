"""What an operator may say of every connector that is a transport under this protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from tandem.kvtransfer.protocol.transport import Direction
from tandem.wire.errors import ConfigurationError


class ProtocolOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # From so many tokens in a step on, their KV leaves while the step is computed, a few layers at a time; 0 is never.
    # Less than that is sent within a millisecond or two, which the extra messages and descriptors would cost as well.
    layerwise_tokens: int = 128


Options = TypeVar("Options", bound=ProtocolOptions)


def parse_options(kind: type[Options], connector: str, options: Mapping[str, str]) -> Options:
    try:
        parsed = msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"transfer.options of the {connector} connector: {error}") from None
    if parsed.layerwise_tokens < 0:
        raise ConfigurationError(
            f"transfer.options.layerwise_tokens must be at least 0, not {parsed.layerwise_tokens}"
        )
    return parsed


def parse_direction(direction: str) -> Direction:
    try:
        return Direction(direction)
    except ValueError:
        known = ", ".join(direction.value for direction in Direction)
        raise ConfigurationError(f"transfer.direction must be one of {known}, not {direction!r}") from None
