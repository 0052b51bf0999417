"""What happens in the cluster, reported to what shows or records it."""

from __future__ import annotations

import logging
from typing import Protocol

logger = logging.getLogger(__name__)


class Events(Protocol):
    def progress(self, name: str, what: str, fraction: float) -> None:
        """`name` is starting: what it is doing, and how much of it is done (0 to 1)."""
        ...

    def ready(self, name: str, what: str) -> None: ...

    def trouble(self, name: str, what: str) -> None:
        """Something went wrong that is being mended."""
        ...

    def gave_up(self, name: str, why: str) -> None:
        """It will not be tried again; the rest serves without it."""
        ...


class LoggedEvents:
    def progress(self, name: str, what: str, fraction: float) -> None:
        logger.debug("%s: %s (%.0f%%)", name, what, 100 * fraction)

    def ready(self, name: str, what: str) -> None:
        logger.info("%s is ready: %s", name, what)

    def trouble(self, name: str, what: str) -> None:
        logger.warning("%s: %s", name, what)

    def gave_up(self, name: str, why: str) -> None:
        logger.error("%s is left out: %s", name, why)
