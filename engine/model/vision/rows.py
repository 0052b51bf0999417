"""Keeps the rows that replace tokens' embeddings, and puts them into batches: rows from the vision tower or an encoder node, and rows that
a request brought.

The scheduler decides which parts are encoded and which are dropped (`engine.cache.encoder_cache`), by the parts' identifiers, so that equal
images are encoded once. For a part that could not be encoded the error is kept until the scheduler drops the part, and each request that needs
it ends with that error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tandem.base.errors import InternalError, TandemError
from tandem.engine.cache.encoder_cache import EncoderInput
from tandem.engine.model.staging import to_device
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature

if TYPE_CHECKING:
    from tandem.engine.model.batching import ScheduledTokens
    from tandem.engine.model.runner import Batch
    from tandem.engine.model.vision.tower import VisionTower


class ImageRows:
    def __init__(self, tower: VisionTower | None, device: torch.device) -> None:
        self._tower = tower
        self._device = device
        self._kept: dict[str, torch.Tensor | TandemError] = {}
        self.media: dict[int, Sequence[MediaFeature]] = {}  # by row, for requests with images
        # By row, the rows that replace the whole prompt's embeddings, in host memory.
        self.embeds: dict[int, torch.Tensor] = {}

    def forget_all(self) -> None:
        self._kept.clear()
        self.media.clear()
        self.embeds.clear()

    def update(self, step: SchedulerOutput) -> None:
        for identifier in step.forgotten_media:
            del self._kept[identifier]
        if not step.encoder_inputs:
            return
        if self._tower is None:
            raise InternalError("a request has images, and the model was loaded without its tower")
        made: list[tuple[EncoderInput, torch.Tensor | TandemError]] = [
            (one, rows_of(one.rows)) for one in step.encoder_inputs if one.rows is not None
        ]
        if wanted := [one for one in step.encoder_inputs if one.rows is None]:
            made += zip(wanted, self._tower.encode(wanted), strict=True)
        for one, rows in made:
            if isinstance(rows, torch.Tensor):
                rows = rows.to(self._device)
            if isinstance(rows, torch.Tensor) and rows.shape[0] != one.length:
                raise InternalError(
                    f"{one.length} tokens stand for a part of an image that is {rows.shape[0]} rows"
                )
            self._kept[one.identifier] = rows

    def placed(self, batch: Batch, scheduled: ScheduledTokens) -> tuple[Batch, dict[str, TandemError]]:
        """Returns the batch with the rows that replace embeddings, and the errors of requests whose images could not be encoded."""
        rows: list[npt.NDArray[np.int64]] = []
        states: list[torch.Tensor] = []
        errors: dict[str, TandemError] = {}
        rope: npt.NDArray[np.int64] | None = None
        for index, row in enumerate(scheduled.rows.tolist()):
            media, embeds = self.media.get(row), self.embeds.get(row)
            if media is None and embeds is None:
                continue
            begin, end = (int(at) for at in scheduled.query_start[index : index + 2])
            last = int(batch.host_context_lens[index])
            first = last - (end - begin)
            if embeds is not None and first < embeds.shape[0]:
                given = embeds[first:last]
                if self._device.type != "cpu":
                    given = given.pin_memory().to(self._device, non_blocking=True)
                states.append(given)
                rows.append(np.arange(first, min(last, embeds.shape[0])) - first + begin)
            if media is None:
                continue
            if media[0].columns:
                if rope is None:
                    rope = np.tile(positions_of(batch), (3, 1))
                rope[:, begin:end] = rope_positions(media, first, last)
            if media[-1].offset + media[-1].length <= first:
                continue  # a fast exit for every token of the answer
            for feature in media:
                start, stop = max(feature.offset, first), min(feature.offset + feature.length, last)
                if start >= stop:
                    continue
                made = self._kept[feature.identifier]
                if isinstance(made, TandemError):
                    errors[scheduled.req_ids[index]] = made
                    break
                states.append(made[start - feature.offset : stop - feature.offset])
                rows.append(np.arange(start, stop) - first + begin)
        if rope is not None:
            batch = dataclasses.replace(batch, rope_positions=to_device(rope, self._device))
        if not rows:
            return batch, errors
        places = to_device(np.concatenate(rows), self._device)
        width = max(one.shape[1] for one in states)
        # Rows that a request brought replace only embeddings, so they are padded with zeros, which layers add without effect.
        states = [pad(one, (0, width - one.shape[1])) if one.shape[1] < width else one for one in states]
        return dataclasses.replace(batch, image_rows=places, image_states=torch.cat(states)), errors


def rows_of(embeds: PromptEmbeds) -> torch.Tensor:
    """The rows as a tensor [rows, width] in host memory."""
    # The bytes are copied, because torch needs writable memory.
    flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return flat.view(embeds.count, embeds.width)


def rope_positions(media: Sequence[MediaFeature], begin: int, end: int) -> npt.NDArray[np.int64]:
    """[3, end - begin]: time, row and column of the request's tokens from `begin` to `end`.

    A text token has the same number for all three. An image's tokens share the time at which it begins, and count rows and columns from
    there; the text goes on after the larger of the two. So tokens after an image have smaller numbers than their position.
    """
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
    """The position of each token, as in a batch without images."""
    counts = np.diff(batch.host_query_start)
    first = batch.host_context_lens - counts
    found: npt.NDArray[np.int64] = np.arange(int(counts.sum())) - np.repeat(
        batch.host_query_start[:-1] - first, counts
    )
    return found
