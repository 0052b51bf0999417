"""What libraries print is not ours to show: Ray prints worker deaths, which the controller reports better."""

from __future__ import annotations

import io
import logging


class OtherPeoplesOutput(io.TextIOBase):
    """A stream whose lines go to the log."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                self._logger.debug("%s", line)
        return len(text)
