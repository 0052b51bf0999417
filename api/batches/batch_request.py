"""What a request for a batch says, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tandem.api.field_table import PathFields
from tandem.base.errors import InvalidRequest

MOST_METADATA = 16
LONGEST_NAME, LONGEST_VALUE = 64, 512
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_WINDOW_S = 30 * 86400
SHORTEST_EXPIRY_S, LONGEST_EXPIRY_S = 3600, 30 * 86400


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    def check(self, endpoints: Sequence[str]) -> None:
        """Raises InvalidRequest. `endpoints`: the paths whose requests this server answers in batches."""
        if self.endpoint not in endpoints:
            raise InvalidRequest(
                f"endpoint: must be one of {', '.join(endpoints)}, not {self.endpoint[:100]!r}", "endpoint"
            )
        window_s(self.completion_window)
        _check_metadata(self.metadata or {})
        if self.output_expires_after is not None:
            check_expiry(self.output_expires_after, "output_expires_after", "created_at")


def window_s(window: str) -> int:
    """Returns the seconds of a completion window. Raises InvalidRequest."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 1 <= seconds <= LONGEST_WINDOW_S:
        raise InvalidRequest(
            f"completion_window: must be a number with s, m, h or d, such as 24h, of at most 30 days, not {window[:40]!r}",
            "completion_window",
        )
    return seconds


def check_expiry(expiry: ExpiresAfter, param: str, *anchors: str) -> None:
    if expiry.anchor not in anchors:
        raise InvalidRequest(f"{param}.anchor: must be {' or '.join(anchors)}, not {expiry.anchor[:40]!r}", param)
    if not SHORTEST_EXPIRY_S <= expiry.seconds <= LONGEST_EXPIRY_S:
        raise InvalidRequest(
            f"{param}.seconds: must be from {SHORTEST_EXPIRY_S} to {LONGEST_EXPIRY_S}, not {expiry.seconds}", param
        )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MOST_METADATA:
        raise InvalidRequest(f"metadata: has {len(metadata)} entries, and may have {MOST_METADATA}", "metadata")
    for name, value in metadata.items():
        if len(name) > LONGEST_NAME or len(value) > LONGEST_VALUE:
            raise InvalidRequest(
                f"metadata: {name[:LONGEST_NAME]!r}: a name has at most {LONGEST_NAME} characters, and a value {LONGEST_VALUE}",
                "metadata",
            )


FIELDS = (PathFields("/v1/batches", BatchRequest),)
