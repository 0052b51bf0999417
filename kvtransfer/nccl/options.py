"""`transfer.options` of the NCCL connector."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.protocol.settings import ProtocolOptions, parse_options


class NcclOptions(ProtocolOptions, frozen=True, forbid_unknown_fields=True):
    backend: str = "auto"  # nccl if the cache is on a GPU, else gloo
    connect_timeout_s: float = 5.0  # for two nodes to find each other, and again to connect
    move_timeout_s: float = 10.0  # for one operation, which has at most 32 MiB; then the group is given up
    # A pair that has moved nothing for this long is taken down. The next transfer makes a new one.
    idle_s: float = 60.0

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> NcclOptions:
        parsed = parse_options(cls, "nccl", options)
        if parsed.backend not in ("auto", "nccl", "gloo"):
            raise ConfigurationError(f"transfer.options.backend must be auto, nccl or gloo, not {parsed.backend!r}")
        for name in ("connect_timeout_s", "move_timeout_s", "idle_s"):
            if not 0 < getattr(parsed, name) <= 3600:
                raise ConfigurationError(
                    f"transfer.options.{name} must be above 0 and at most 3600, not {getattr(parsed, name)}"
                )
        return parsed
