"""The store's thread. Files and the database are never touched on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.base.errors import TandemError
from tandem.router.batches.database import StoreUnavailable, translated
from tandem.router.batches.store import BatchStore

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # then a client is told that the disk does not answer

T = TypeVar("T")


class StoreThread:
    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def do(self, work: Callable[[BatchStore], T]) -> T:
        """Runs `work`, after what was asked before. Raises DiskFull or StoreUnavailable for what fails below it. Work that
        has begun is finished even if the caller is cancelled. Waits as long as the disk does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    async def ask(self, work: Callable[[BatchStore], T]) -> T:
        """As `do`, for a client, which is not kept waiting for a disk that hangs."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self.do(work)
        except TimeoutError:
            raise StoreUnavailable(
                f"the disk of {self.store.place.folder} has not answered for {ANSWER_S:g} s (router.batches_folder)"
            ) from None

    def soon(self, work: Callable[[BatchStore], object]) -> None:
        """Runs `work` after what was asked before. Nothing waits for it."""

        def run() -> None:
            try:
                self._run(work)
            except TandemError as error:
                logger.warning("batches: %s", error)

        self._thread.submit(run)

    def _run(self, work: Callable[[BatchStore], T]) -> T:
        with translated(self.store.place.folder):
            return work(self.store)

    async def close(self) -> None:
        try:
            await self.ask(BatchStore.close)
        finally:
            self._thread.shutdown(wait=False)
