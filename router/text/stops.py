"""Stop strings, found wherever they end, also across tokens; text that may become one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed it text in pieces of any size: what it lets through is the same for every way of cutting the text."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certainly part of the answer. Once `matched` is set nothing more comes."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end = self._first_match(text)
        if end is not None:
            self._held = ""
            return text[:end]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The end of the stream: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the answer ends, if a stop string is complete. The one that is complete first wins.

        With the text cut differently the same one must win, so the order is that of completion; among those
        that end together the longest, because it began first.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        self.matched = best[2]
        return best[0] if self._include_stop else best[1]

    def _possible_start(self, text: str) -> int:
        """The first position from which the text could still grow into a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
