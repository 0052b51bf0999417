"""Waits, with a deadline, for a condition that another thread brings about without an event."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.loops import PATIENCE_S


def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
