"""Waits for a tier's copies, which the product never does."""

from __future__ import annotations

import time

from tandem.kvtransfer.offload.spec import Mover

PATIENCE_S = 20.0


def ended(mover: Mover, *jobs: int) -> dict[int, bool | None]:
    """Returns how these copies have ended."""
    end = time.monotonic() + PATIENCE_S
    found: dict[int, bool | None] = {}
    while not found.keys() >= set(jobs):
        assert time.monotonic() < end, f"{found} have ended"
        time.sleep(0.001)
        found |= mover.take_ended()
    return found
