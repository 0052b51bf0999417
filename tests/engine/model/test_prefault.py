"""Pages are made ahead of their use, a window at a time, and what they hold is never touched."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.engine.model import prefault
from tandem.engine.model.prefault import PageMaker

BLOCK = 1 << 20
PATIENCE_S = 10.0


def cache_of(blocks: int) -> tuple[torch.Tensor, mmap.mmap]:
    region = mmap.mmap(-1, blocks * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(region, dtype=torch.uint8).view(blocks, BLOCK), region


def resident(cache: torch.Tensor) -> int:
    """Its bytes that are in memory, by the kernel's own account of each page. (What /proc says of whole mappings may be
    about this one and its neighbours: the kernel makes one of those that adjoin.)"""
    page = mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(cache.data_ptr() // page * 8)
        entries = np.frombuffer(pages.read(cache.nbytes // page * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page


def until(cache: torch.Tensor, made: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while resident(cache) < made:
        assert time.monotonic() < deadline, f"{resident(cache)} bytes made, not {made}"
        time.sleep(0.002)


def maker_of(cache: torch.Tensor) -> tuple[PageMaker, threading.Thread]:
    """With its thread."""
    before = set(threading.enumerate())
    maker = PageMaker(cache)
    [thread] = set(threading.enumerate()) - before
    return maker, thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


@pytest.fixture(autouse=True)
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "WINDOW_BYTES", 4 * BLOCK)
    monkeypatch.setattr(prefault, "PIECE_BYTES", BLOCK)


def test_a_window_is_made_and_grows_with_what_is_used() -> None:
    cache, _ = cache_of(40)
    assert resident(cache) == 0
    maker, thread = maker_of(cache)
    until(cache, 4 * BLOCK)
    assert resident(cache) <= 6 * BLOCK, "no more than a window, and what the kernel rounds to"
    maker.reached(9)
    until(cache, 14 * BLOCK)
    maker.reached(3)
    assert maker.made < 40 * BLOCK
    maker.reached(39)
    until(cache, 40 * BLOCK)
    assert has_ended(thread)
    assert resident(cache) == maker.made == 40 * BLOCK
    maker.stop()
    maker.stop()


def test_its_thread_is_as_important_as_others() -> None:
    """While it makes pages, threads that map memory wait for it. On a busy machine it would seldom run if it were less important."""
    cache, _ = cache_of(8)
    maker, thread = maker_of(cache)
    until(cache, 4 * BLOCK)
    assert thread.native_id is not None
    of_thread, of_this = (
        os.getpriority(os.PRIO_PROCESS, number) for number in (thread.native_id, threading.get_native_id())
    )
    assert of_thread == of_this
    maker.stop()


def test_what_is_written_meanwhile_stays() -> None:
    cache, _ = cache_of(16)
    cache[2] = 7
    maker, thread = maker_of(cache)
    for block in range(16):
        cache[block, ::4096] = block + 1
        maker.reached(block)
    assert has_ended(thread), "it has made them all"
    assert [int(cache[block, 4096]) for block in range(16)] == list(range(1, 17))
    assert int(cache[2, 1]) == 7
    assert int(cache[3, 1]) == 0


def test_a_kernel_that_cannot_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_MADV_POPULATE_WRITE", 12345)
    cache, _ = cache_of(8)
    before = threading.active_count()
    maker = PageMaker(cache)
    maker.reached(5)
    maker.stop()  # which waits for its thread
    assert resident(cache) == 0
    assert maker.made == 6 * BLOCK, "what is in use has been written"
    assert threading.active_count() <= before


def test_it_ends_with_its_cache() -> None:
    cache, _ = cache_of(8)
    _, thread = maker_of(cache)
    until(cache, 4 * BLOCK)
    del cache
    assert has_ended(thread)
