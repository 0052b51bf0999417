"""Keeps the rows that replace the embeddings of images' tokens, from the vision tower or an encoder node, and puts them into batches.

The scheduler decides which parts are encoded and which are dropped (`engine.scheduling.encoding.budget`), by the parts' identifiers, so that equal
images are encoded once. For a part that could not be encoded the error is kept until the scheduler drops the part, and each request that needs
it ends with that error.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tandem.base.errors import InternalError, TandemError
from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice
from tandem.engine.model.embeds import rows_of, with_rows
from tandem.engine.model.parts import AskedRequest, RunnerPart
from tandem.engine.model.runner import Around, Batch
from tandem.engine.model.staging import to_device
from tandem.engine.scheduling.output import EncoderInput, SchedulerOutput
from tandem.wire.images import MediaFeature

if TYPE_CHECKING:
    from tandem.engine.model.vision.tower import VisionTower


class ImageRows(RunnerPart):
    def __init__(self, tower: VisionTower, device: torch.device) -> None:
        self._tower = tower
        self._device = device
        self._kept: dict[str, torch.Tensor | TandemError] = {}
        self._media: dict[int, Sequence[MediaFeature]] = {}  # by row, for requests with images

    def add(self, row: int, asked: AskedRequest, requests: RequestRows) -> None:
        if asked.image_parts:
            self._media[row] = asked.image_parts

    def clear(self, row: int) -> None:
        self._media.pop(row, None)

    def forget_requests(self) -> None:
        self._kept.clear()

    def begin(self, step: SchedulerOutput) -> None:
        for identifier in step.forgotten_media:
            del self._kept[identifier]
        if not step.encoder_inputs:
            return
        made: list[tuple[EncoderInput, torch.Tensor | TandemError]] = [
            (one, rows_of(one.rows)) for one in step.encoder_inputs if one.rows is not None
        ]
        if wanted := [one for one in step.encoder_inputs if one.rows is None]:
            made += zip(wanted, self._tower.encode(wanted), strict=True)
        for one, rows in made:
            if isinstance(rows, torch.Tensor):
                rows = rows.to(self._device)
            if isinstance(rows, torch.Tensor) and rows.shape[0] != one.length:
                raise InternalError(f"{one.length} tokens stand for a part of an image that is {rows.shape[0]} rows")
            self._kept[one.identifier] = rows

    def prepare(self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice) -> Batch:
        """Adds the rows of images' tokens. A request whose image could not be encoded ends with the error."""
        if not self._media:
            return batch
        places: list[npt.NDArray[np.int64]] = []
        states: list[torch.Tensor] = []
        rope: npt.NDArray[np.int64] | None = None
        for index, row in enumerate(scheduled.rows.tolist()):
            media = self._media.get(row)
            if media is None:
                continue
            begin, end = (int(at) for at in scheduled.query_start[index : index + 2])
            last = int(batch.host_context_lens[index])
            first = last - (end - begin)
            if media[0].columns:
                if rope is None:
                    rope = np.tile(batch.host.positions, (3, 1))
                rope[:, begin:end] = rope_positions(media, first, last)
            if media[-1].offset + media[-1].length <= first:
                continue  # a fast exit for every token of the answer
            for feature in media:
                start, stop = max(feature.offset, first), min(feature.offset + feature.length, last)
                if start >= stop:
                    continue
                made = self._kept[feature.identifier]
                if isinstance(made, TandemError):
                    started.errors[scheduled.req_ids[index]] = made
                    break
                states.append(made[start - feature.offset : stop - feature.offset])
                places.append(np.arange(start, stop) - first + begin)
        if rope is not None:
            batch = dataclasses.replace(batch, rope_positions=to_device(rope, self._device))
        return with_rows(batch, places, states)


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


def deeper_rows(model: PreTrainedModel) -> Around | None:
    """What happens around a forward pass of this model; None if no layer adds to images' rows."""
    language: Any = getattr(model.base_model, "language_model", None)
    if language is None or "deepstack_visual_embeds" not in inspect.signature(language.forward).parameters:
        return None
    hidden = int(model.config.get_text_config().hidden_size)

    @contextmanager
    def telling(batch: Batch) -> Iterator[None]:
        states, places = batch.image_states, batch.image_rows
        if states is None or places is None or states.shape[1] == hidden:
            yield
            return
        _, *deeper = torch.split(states, hidden, dim=1)
        mask = torch.zeros(1, batch.num_tokens, dtype=torch.bool, device=states.device)
        mask[0, places] = True
        # The model takes these rows in the order of its tokens.
        order = places.argsort()
        given = {"visual_pos_masks": mask, "deepstack_visual_embeds": [each[order] for each in deeper]}

        def tell(_module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return inputs, options | given

        hook = language.register_forward_pre_hook(tell, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    return telling
