"""What counts as a request served well: `ttft=200ms,itl=50ms`."""

from __future__ import annotations

import re

import msgspec

from tandem.loadgen.percentiles import percentile
from tandem.loadgen.timeline import Timeline
from tandem.wire.errors import ConfigurationError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")
# Of its own inter-token latencies, the part of a request that has to be within the limit: one hiccup in a long
# answer does not spoil it, one in a short answer does.
_ITL_PERCENT = 99.0


class ServiceLevel(msgspec.Struct, frozen=True):
    """Limits in seconds; None does not limit."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def is_met_by(self, timeline: Timeline) -> bool:
        if not timeline.succeeded:
            return False
        if self.ttft is not None and timeline.ttft > self.ttft:
            return False
        if self.e2e is not None and timeline.e2e > self.e2e:
            return False
        if self.tpot is not None and (timeline.tpot or 0.0) > self.tpot:
            return False
        if self.itl is not None and len(timeline.chunk_times) > 1:
            return percentile(sorted(timeline.inter_token), _ITL_PERCENT) <= self.itl
        return True

    def __str__(self) -> str:
        limits = {name: getattr(self, name) for name in self.__struct_fields__}
        return ", ".join(
            f"{name} ≤ {limit * 1e3:g} ms" for name, limit in limits.items() if limit is not None
        )


def parse_service_level(text: str) -> ServiceLevel:
    """`name=limit` pairs; a limit without a unit is in milliseconds."""
    limits: dict[str, float] = {}
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        match = _DURATION.fullmatch(value.strip())
        if name not in ServiceLevel.__struct_fields__ or match is None:
            known = ", ".join(ServiceLevel.__struct_fields__)
            raise ConfigurationError(
                f"{pair.strip()!r} must be a limit on one of {known}, such as ttft=200ms or itl=0.05s"
            )
        if name in limits:
            raise ConfigurationError(f"{name} is limited twice")
        limits[name] = float(match[1]) * (1.0 if match[2] == "s" else 1e-3)
    return ServiceLevel(**limits)
