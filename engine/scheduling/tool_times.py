"""How long tools take, learned from the time between a turn's end and the arrival of its job's next turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

WEIGHT = 0.3  # of the newest time
MOST_TOOLS = 4096

# The tools that a turn called, by name. None: no router has said so yet, or none reads calls.
Tools = Sequence[str] | None

_UNNAMED = ""


class ToolTimes:
    """A tool that was never seen gets the benefit of the doubt."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._expected: OrderedDict[tuple[str, bool], float] = OrderedDict()  # the tools seen last at the end

    def expected(self, tools: Tools) -> float | None:
        """The slowest tool decides: calls of one turn run beside each other. None: not one of them is known."""
        known = [seconds for key in _keys(tools) if (seconds := self._expected.get(key)) is not None]
        return max(known, default=None)

    def pin_s(self, tools: Tools) -> float:
        """How long to pin a turn that called these; 0: the next turn is not expected within the limit."""
        expected = self.expected(tools)
        return 0.0 if expected is not None and expected > self.limit_s else self.limit_s

    def took(self, tools: Tools, seconds: float) -> None:
        """Counts for the tool that was expected to be the slowest, and first of all for one that is not known."""
        key = max(_keys(tools), key=lambda key: self._expected.get(key, float("inf")))
        before = self._expected.pop(key, seconds)
        self._expected[key] = before + WEIGHT * (seconds - before)
        if len(self._expected) > MOST_TOOLS:
            self._expected.popitem(last=False)


def _keys(tools: Tools) -> list[tuple[str, bool]]:
    """A turn whose calls are unknown is one kind of tool, and a turn without calls another: a person reads it."""
    if tools is None:
        return [(_UNNAMED, False)]
    return [(name, True) for name in tools] or [(_UNNAMED, True)]
