"""Positions of tokens in prompts with images, for models that count an image's by rows and columns.

A text's tokens have one number for time, row and column. An image's tokens share the time at which it begins, and have a row and a column
from there; the text goes on after the larger of the two. So tokens after an image stand nearer than their number says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tandem.wire.images import MediaFeature

if TYPE_CHECKING:
    from tandem.engine.model.batch import Batch


def rope_positions(media: Sequence[MediaFeature], begin: int, end: int) -> npt.NDArray[np.int64]:
    """[3, end - begin], of a prompt's and its answer's tokens from `begin` to `end`."""
    found = np.tile(np.arange(begin, end), (3, 1))
    shift = 0
    for feature in media:
        if feature.offset >= end:
            break
        after = feature.offset + feature.length
        first, last = max(feature.offset, begin), min(after, end)
        if first < last:
            places = np.arange(first, last) - feature.offset
            columns = (np.zeros_like(places), places // feature.columns, places % feature.columns)
            found[:, first - begin : last - begin] = feature.offset + shift + np.stack(columns)
        shift += max(feature.length // feature.columns, feature.columns) - feature.length
        if after < end:
            rest = max(after, begin)
            found[:, rest - begin :] = np.arange(rest, end) + shift
    return found


def positions_of(batch: Batch) -> npt.NDArray[np.int64]:
    """One number for each token, as a batch without images has them."""
    counts = np.diff(batch.host_query_start)
    first = batch.host_context_lens - counts
    found: npt.NDArray[np.int64] = np.arange(int(counts.sum())) - np.repeat(
        batch.host_query_start[:-1] - first, counts
    )
    return found
