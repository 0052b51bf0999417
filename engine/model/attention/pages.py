"""A batch's block tables in the form that libraries' kernels take: all requests' pages, end to end."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from tandem.engine.model.runner import HostBatch


@dataclasses.dataclass(frozen=True, slots=True)
class Pages:
    """Arrays of int32 in host memory. Request r has pages[page_start[r] : page_start[r + 1]]; the last one is filled up to
    last_page_len[r]. A query's position is counted from the end of its request's pages, so pages before a sliding window may be left
    out."""

    query_start: npt.NDArray[np.int32]  # [R + 1]
    page_start: npt.NDArray[np.int32]  # [R + 1]
    pages: npt.NDArray[np.int32]
    last_page_len: npt.NDArray[np.int32]  # [R]


def pages_of(host: HostBatch, group: int, window: int | None, block_size: int) -> Pages:
    """The pages of one group. A sliding group has only those that its first row's window touches, because other requests may own the
    earlier ones by now."""
    contexts = host.context_lens.astype(np.int64)
    queries = np.diff(host.query_start).astype(np.int64)
    first = np.zeros_like(contexts) if window is None else np.maximum(0, contexts - queries + 1 - window)
    first_column = first // block_size
    end_column = (contexts + block_size - 1) // block_size
    counts = end_column - first_column
    page_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=page_start[1:])
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(int(page_start[-1])) - np.repeat(page_start[:-1] - first_column, counts)
    return Pages(
        query_start=host.query_start.astype(np.int32),
        page_start=page_start,
        pages=host.block_tables[group][row, column].astype(np.int32),
        last_page_len=(contexts - (end_column - 1) * block_size).astype(np.int32),
    )


def padded(pages: Pages | None, size: int) -> Pages:
    """Pads to `size` requests of one query each. Padding reads one key of the null block."""
    known = 0 if pages is None else len(pages.last_page_len)
    missing = size - known
    start = 0 if pages is None else int(pages.page_start[-1])
    filler = np.zeros(missing, np.int32)
    empty = np.zeros(0, np.int32)
    return Pages(
        query_start=np.arange(size + 1, dtype=np.int32),
        page_start=np.concatenate(
            (
                np.zeros(1, np.int32) if pages is None else pages.page_start,
                start + 1 + np.arange(missing, dtype=np.int32),
            )
        ).astype(np.int32),
        pages=np.concatenate((empty if pages is None else pages.pages, filler)),
        last_page_len=np.concatenate((empty if pages is None else pages.last_page_len, filler + 1)),
    )
