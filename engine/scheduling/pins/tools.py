"""How long tools take, learnt from the time between a turn's end and the arrival of its job's next turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

WEIGHT = 0.3  # how much the newest time counts in a tool's average
MOST_TOOLS = 4096

# The names of the tools that a turn called; empty when it called none. None: no router has told, or none parses calls.
Tools = Sequence[str] | None

_UNNAMED = ""


class ToolTimes:
    """How long each tool takes. A tool that was never seen is assumed to be quick."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        # Seconds by tool, the least recently seen first.
        self._expected: OrderedDict[tuple[str, bool], float] = OrderedDict()

    def expected(self, tools: Tools) -> float | None:
        """The time of the slowest tool, because the calls of one turn run in parallel. None when none of them is known."""
        known = [seconds for key in _keys(tools) if (seconds := self._expected.get(key)) is not None]
        return max(known, default=None)

    def pin_s(self, tools: Tools) -> float:
        """How long to pin a turn that called `tools`; 0 when its next turn is not expected within the limit."""
        expected = self.expected(tools)
        return 0.0 if expected is not None and expected > self.limit_s else self.limit_s

    def took(self, tools: Tools, seconds: float) -> None:
        """A turn's calls took this long. The time counts for one of the tools: an unknown one, else the one expected to be the
        slowest."""
        key = max(_keys(tools), key=lambda key: self._expected.get(key, float("inf")))
        before = self._expected.pop(key, seconds)
        self._expected[key] = before + WEIGHT * (seconds - before)
        if len(self._expected) > MOST_TOOLS:
            self._expected.popitem(last=False)


def _keys(tools: Tools) -> list[tuple[str, bool]]:
    """The keys of a turn's tools. Turns whose calls are unknown share one key; turns without calls, which a person answers,
    share another."""
    if tools is None:
        return [(_UNNAMED, False)]
    return [(name, True) for name in tools] or [(_UNNAMED, True)]
