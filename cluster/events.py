"""Reports what happens in the deployment to whatever shows or records it."""

from __future__ import annotations

import logging
from typing import Protocol

logger = logging.getLogger(__name__)


class Events(Protocol):
    def progress(self, name: str, what: str, fraction: float) -> None:
        """`name` is starting. `what` says what it is doing, `fraction` how much of that is done (0 to 1)."""

    def ready(self, name: str, what: str) -> None: ...

    def trouble(self, name: str, what: str) -> None:
        """Something failed and is being repaired."""

    def gave_up(self, name: str, why: str) -> None:
        """`name` failed for good and is not started again. The rest of the deployment serves without it."""


class LoggedEvents:
    def progress(self, name: str, what: str, fraction: float) -> None:
        logger.debug("%s: %s (%.0f%%)", name, what, 100 * fraction)

    def ready(self, name: str, what: str) -> None:
        logger.info("%s is ready: %s", name, what)

    def trouble(self, name: str, what: str) -> None:
        logger.warning("%s: %s", name, what)

    def gave_up(self, name: str, why: str) -> None:
        logger.error("%s is left out: %s", name, why)
