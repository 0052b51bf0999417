"""Which blocks a peer may write to, and until when.

What arrives is copied into the cache by a thread of this process. So a write whose transfer has ended here, because
its sender or this process stood still for too long, can be refused, and is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence


class BlockGate:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, frozenset[int]] = {}

    def expect(self, transfer_id: str, blocks: Sequence[int]) -> None:
        with self._lock:
            self._open[transfer_id] = frozenset(blocks)

    def expect_no_more(self, transfer_id: str) -> None:
        """Waits for a copy that is under way: some milliseconds."""
        with self._lock:
            self._open.pop(transfer_id, None)

    @contextlib.contextmanager
    def landing(self, transfer_id: str, blocks: set[int]) -> Iterator[bool]:
        """Whether a write may land; it stays so while the context is open."""
        with self._lock:
            yield blocks <= self._open.get(transfer_id, frozenset())
