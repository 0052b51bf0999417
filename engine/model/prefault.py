"""Faults in the KV cache's memory pages before a forward pass or a transfer touches them. The first touch costs a page fault and the
page's zeroing, about 0.6 ms per MiB in a virtual machine.

It works only a window ahead of the blocks in use, so the cache takes memory as it fills.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref

import torch

log = logging.getLogger(__name__)

WINDOW_BYTES = 256 << 20
PIECE_BYTES = 1 << 20  # in one call
# The thread works for this share of the time. Each call holds a lock, and the process's other threads need it to map memory. A thread
# of low priority would seldom run on a busy machine, and keep the lock while it waits. So this one keeps its priority, and pauses.
SHARE = 0.25
_MADV_POPULATE_WRITE = 23  # since Linux 5.14: faults pages in as a write would, without writing


class PageMaker:
    """A thread that faults pages in, a quarter of the time. It ends when the whole cache is faulted in, or when the cache is freed.
    Any thread may call `reached`."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._address = cache.data_ptr()
        self._block_bytes = cache[0].numel() * cache.element_size()
        self._length = cache.shape[0] * self._block_bytes
        self._wanted = min(self._length, WINDOW_BYTES)
        # How many bytes of the cache are in memory.
        self.made = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._thread = threading.Thread(target=self._run, name="page-maker", daemon=True)
        self._thread.start()
        weakref.finalize(cache, self._end)

    def reached(self, block: int) -> bool:
        """This block is in use, so blocks after it may be next. Returns False once the thread is working on the rest of the cache:
        further calls are then unnecessary."""
        wanted = min(self._length, (block + 1) * self._block_bytes + WINDOW_BYTES)
        if wanted > self._wanted + PIECE_BYTES or wanted == self._length > self._wanted:
            with self._changed:
                self._wanted = max(self._wanted, wanted)
                self._changed.notify()
        return self._wanted < self._length

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while self.made < self._length:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause_s)
                    self._changed.wait_for(lambda: self._stopping or self.made < self._wanted)
                    if self._stopping:
                        return
                    end = min(self._wanted, self.made + PIECE_BYTES)
                began = time.monotonic()
                self._make(end)
                pause_s = (time.monotonic() - began) * (1 / SHARE - 1)
        except OSError as error:
            # The kernel is older, or memory is short. The pages are then faulted in when they are touched.
            log.debug("pages of the KV cache are not made ahead: %s", error)

    def _make(self, end: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        first = (self._address + self.made) // page * page
        last = -(-(self._address + end) // page) * page
        if self._madvise(first, last - first, _MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "madvise")
        self.made = end

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def stop(self) -> None:
        """Waits until the thread has ended, at most 5 s. The cache's memory may be freed afterwards. Idempotent."""
        self._end()
        self._thread.join(5)
