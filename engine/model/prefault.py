"""Pages of the KV cache are made before they are needed: the first touch of one costs a fault and its zeroing, some
0.6 ms for a MiB in a virtual machine, and it would be paid within a forward pass or a transfer.

Only a window ahead of what has been used: a cache takes memory as it fills, not before.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref

import torch

log = logging.getLogger(__name__)

WINDOW_BYTES = 256 << 20
PIECE_BYTES = 4 << 20  # at once, so that an end is noticed soon
_MADV_POPULATE_WRITE = 23  # Linux 5.14: makes pages as a write would, and writes nothing
_LEAST_IMPORTANT = 19


class PageMaker:
    """A thread that the others don't notice; it ends with the cache, or when all of that is made. `reached` may be called from any thread."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._address = cache.data_ptr()
        self._block_bytes = cache[0].numel() * cache.element_size()
        self._length = cache.shape[0] * self._block_bytes
        self._wanted = min(self._length, WINDOW_BYTES)
        self._made = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._thread = threading.Thread(target=self._run, name="page-maker", daemon=True)
        self._thread.start()
        weakref.finalize(cache, self._end)

    @property
    def made_bytes(self) -> int:
        return self._made

    def reached(self, block: int) -> bool:
        """This block is in use: those after it may be next. False: the rest of the cache is being made, and nothing more need be said."""
        wanted = min(self._length, (block + 1) * self._block_bytes + WINDOW_BYTES)
        if wanted > self._wanted + PIECE_BYTES or wanted == self._length > self._wanted:
            with self._changed:
                self._wanted = max(self._wanted, wanted)
                self._changed.notify()
        return self._wanted < self._length

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_IMPORTANT)
            while self._made < self._length:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._made < self._wanted)
                    if self._stopping:
                        return
                    end = min(self._wanted, self._made + PIECE_BYTES)
                self._make(end)
        except OSError as error:
            # An older kernel, or no memory for pages that were not asked for yet: then they are made when touched.
            log.debug("pages of the KV cache are not made ahead: %s", error)

    def _make(self, end: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        first = (self._address + self._made) // page * page
        last = -(-(self._address + end) // page) * page
        if self._madvise(first, last - first, _MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "madvise")
        self._made = end

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def stop(self) -> None:
        """Idempotent. The cache's memory may be given back afterwards."""
        self._end()
        self._thread.join(5)
