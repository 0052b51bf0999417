"""What a runner has only for some models or settings. The runner calls each part that it has at the same points of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.wire.images import MediaFeature
from tandem.wire.requests import RequestFacts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from tandem.base.errors import TandemError
    from tandem.engine.model.batching import RequestRows, SamplingTable, ScheduledTokens, StepOnDevice
    from tandem.engine.model.runner import Batch, Forward, Grammars
    from tandem.engine.scheduling.output import SchedulerOutput

Drafts = dict[str, list[int]]
"""Tokens that may follow, by request."""


@dataclasses.dataclass(frozen=True, slots=True)
class AskedRequest:
    """What only a request's first step says about it. The runner keeps it while the request is preempted."""

    facts: RequestFacts
    image_parts: Sequence[MediaFeature]


class RunnerPart:
    """Does nothing. A part overrides what it needs. Only the step thread calls it, except `is_full`."""

    @property
    def is_full(self) -> bool:
        """Whether it has so much to do that no further request may ask for it."""
        return False

    def begin(self, step: SchedulerOutput) -> None:
        """A step begins; its requests have their rows."""

    def add(self, row: int, asked: AskedRequest, requests: RequestRows) -> None:
        """A request, new or resumed, got a row."""

    def clear(self, row: int) -> None:
        """The row's request left, or begins again."""

    def forget_requests(self) -> None:
        """All requests have left. Called after `clear` for each of them."""

    def prepare(self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice) -> Batch:
        """Before a forward pass: returns the batch with what this part adds."""
        return batch

    def computed(
        self, batch: Batch, scheduled: ScheduledTokens, requests: RequestRows, started: StepOnDevice, forward: Forward
    ) -> None:
        """After the forward pass of this batch."""


class TokenMasks(Protocol):
    """Masks the logits of rows with a grammar, so that they choose only tokens that it allows. Only the step thread uses it."""

    @property
    def grammars(self) -> Grammars: ...

    @property
    def failed(self) -> dict[int, TandemError]:
        """By row, why a request of the last `apply` cannot go on."""

    def apply(
        self,
        scores: torch.Tensor,  # [S, V] float32, changed in place
        logits: torch.Tensor,  # [S, V], as they came from the model
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        requests: RequestRows,
        table: SamplingTable,
    ) -> None: ...

    def num_allowed(self, row: int, drafts: list[int], requests: RequestRows, table: SamplingTable) -> int:
        """How many of the leading `drafts` the row's grammar allows after its tokens."""

    def forced(self, row: int, most: int, requests: RequestRows, table: SamplingTable) -> list[int]:
        """Up to `most` tokens of the text that the row's grammar leaves no choice about: drafts that are nearly always right."""


class Drafter(Protocol):
    """Makes drafts. Only the step thread uses it."""

    @property
    def guess_s(self) -> float:
        """Seconds per token of the last call's drafts; 0 if it takes next to nothing."""

    def propose(self, requests: RequestRows, wanted: Mapping[str, int]) -> Drafts:
        """Makes drafts of up to `wanted` tokens after each request's newest one; a request may get none."""

    def forget_requests(self) -> None: ...
