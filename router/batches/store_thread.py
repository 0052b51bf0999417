"""The store's thread. Files and the database are never touched on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.router.batches.database import translated
from tandem.router.batches.store import BatchStore

T = TypeVar("T")


class StoreThread:
    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def do(self, work: Callable[[BatchStore], T]) -> T:
        """Runs `work`, after what was asked before. Raises DiskFull or StoreUnavailable for what fails below it. Work that
        has begun is finished even if the caller is cancelled."""

        def run() -> T:
            with translated(self.store.folder):
                return work(self.store)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def close(self) -> None:
        try:
            await self.do(BatchStore.close)
        finally:
            self._thread.shutdown(wait=False)
