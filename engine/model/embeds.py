"""Rows that a request brought in place of its prompt's tokens, and how rows take the place of embeddings in a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tandem.engine.model.batching import RequestRows, ScheduledTokens, StepOnDevice
from tandem.engine.model.parts import AskedRequest, RunnerPart
from tandem.engine.model.runner import Batch
from tandem.engine.model.staging import to_device
from tandem.wire.embeds import PromptEmbeds


class EmbeddedPrompts(RunnerPart):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, torch.Tensor] = {}  # by the request's row, in host memory

    def add(self, row: int, asked: AskedRequest, requests: RequestRows) -> None:
        if asked.facts.embeds is not None:
            self._rows[row] = rows_of(asked.facts.embeds)
            requests.num_unsaid[row] = asked.facts.embeds.count

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)

    def prepare(self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice) -> Batch:
        if not self._rows:
            return batch
        places: list[npt.NDArray[np.int64]] = []
        states: list[torch.Tensor] = []
        for index, row in enumerate(scheduled.rows.tolist()):
            embeds = self._rows.get(row)
            if embeds is None:
                continue
            begin, end = (int(at) for at in scheduled.query_start[index : index + 2])
            last = int(batch.host_context_lens[index])
            first = last - (end - begin)
            if first < embeds.shape[0]:
                given = embeds[first:last]
                if self._device.type != "cpu":
                    given = given.pin_memory().to(self._device, non_blocking=True)
                states.append(given)
                places.append(np.arange(first, min(last, embeds.shape[0])) - first + begin)
        return with_rows(batch, places, states)


def rows_of(embeds: PromptEmbeds) -> torch.Tensor:
    """The rows as a tensor [rows, width] in host memory."""
    # The bytes are copied, because torch needs writable memory.
    flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return flat.view(embeds.count, embeds.width)


def with_rows(batch: Batch, places: Sequence[npt.NDArray[np.int64]], states: Sequence[torch.Tensor]) -> Batch:
    """Returns the batch with these rows in place of the embeddings at `places`, beside the rows that it has already."""
    if not places:
        return batch
    at = to_device(np.concatenate(places), batch.token_ids.device)
    if batch.image_rows is not None and batch.image_states is not None:
        at, states = torch.cat([batch.image_rows, at]), [batch.image_states, *states]
    width = max(one.shape[1] for one in states)
    # Rows that replace only embeddings are padded with zeros, which layers add without effect.
    states = [pad(one, (0, width - one.shape[1])) if one.shape[1] < width else one for one in states]
    return dataclasses.replace(batch, image_rows=at, image_states=torch.cat(states))
