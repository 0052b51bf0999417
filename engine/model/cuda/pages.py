"""A batch's block tables in the form that libraries' kernels take: all requests' pages, end to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.engine.model.runner import HostBatch

# In a trial each request has up to this many pages.
_TRIED_PAGES = 3


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


def requests_of(host: HostBatch, first: int, end: int) -> HostBatch:
    starts = host.query_start[first : end + 1]
    rows, asked = slice(int(starts[0]), int(starts[-1])), host.logit_rows
    return HostBatch(
        positions=host.positions[rows],
        query_start=starts - starts[0],
        context_lens=host.context_lens[first:end],
        slot_mapping=tuple(slots[rows] for slots in host.slot_mapping),
        block_tables=tuple(table[first:end] for table in host.block_tables),
        logit_rows=asked[(asked >= rows.start) & (asked < rows.stop)] - rows.start,
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


def trial(num_blocks: int, block_size: int, num_groups: int, rows: Sequence[int]) -> HostBatch:
    """A step in the first blocks that requests can have, of which a kernel that mistakes pages gets something wrong: requests of these
    numbers of rows behind a prefix, with pages in descending order and the last one half filled. In a small cache they have fewer
    pages, or only the last request is there."""
    there = num_blocks - 1
    rows = rows[-there:]
    each = min(_TRIED_PAGES, there // len(rows))
    context = each * block_size - block_size // 2
    lengths = np.minimum(rows, context)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    table = np.arange(len(rows) * each, 0, -1, dtype=np.int32).reshape(len(rows), each)
    places = np.concatenate([np.arange(context - length, context) for length in lengths])
    slots = table[np.repeat(np.arange(len(rows)), lengths), places // block_size].astype(np.int64)
    slots = slots * block_size + places % block_size
    contexts = np.full(len(rows), context, np.int32)
    return HostBatch(places, starts, contexts, (slots,) * num_groups, (table,) * num_groups, starts[1:] - 1)
