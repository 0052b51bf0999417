"""`transfer.options` of the NIXL connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.protocol.settings import ProtocolOptions, parse_options

_OF_BACKEND = "backend."


class NixlOptions(ProtocolOptions, frozen=True, forbid_unknown_fields=True):
    backend: str = "UCX"
    # How often NIXL's progress thread wakes without an event, in milliseconds. At 0, NIXL's default, it spins and
    # takes a core.
    progress_ms: int = 100
    # `host`: KV on a GPU moves through page-locked host memory, as large as the KV cache.
    staging: Literal["none", "host"] = "none"

    # The backend's own parameters, written as `backend.NAME`.
    parameters: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> NixlOptions:
        own = {name: value for name, value in options.items() if not name.startswith(_OF_BACKEND)}
        parsed = parse_options(cls, "nixl", own)
        parameters = {
            name.removeprefix(_OF_BACKEND): value for name, value in options.items() if name.startswith(_OF_BACKEND)
        }
        parsed = msgspec.structs.replace(parsed, parameters=parameters)
        if parsed.progress_ms < 1:
            raise ConfigurationError(
                f"transfer.options.progress_ms must be at least 1, not {parsed.progress_ms}: at 0 NIXL spins"
            )
        return parsed
