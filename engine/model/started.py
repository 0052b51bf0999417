"""What a step has given to the device, and what of it the host does not know yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tandem.engine.model.batching import UnreadTokens
from tandem.engine.model.pooler import PooledVector
from tandem.engine.model.sampling.logprobs import ComputedLogprobs
from tandem.engine.model.staging import DeviceMark, HostCopy
from tandem.engine.scheduling.output import ModelOutput
from tandem.wire.errors import TandemError


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens of one request after the other: of each its next, or with drafts its next few."""

    req_ids: list[str]
    rows: npt.NDArray[np.int64]  # of RequestRows
    tenancies: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    tokens: HostCopy  # below 0 where there could be none
    failed: dict[int, TandemError]  # rows that can have none, and why
    logprobs: dict[int, ComputedLogprobs]  # of rows that want them, for all their tokens


@dataclasses.dataclass(frozen=True, slots=True)
class PromptPiece:
    """Log-probabilities of some tokens of a prompt."""

    req_id: str
    first: int  # the first of those tokens
    num_prompt: int
    is_last: bool
    logprobs: ComputedLogprobs | None  # None where the piece has none but the prompt's first token


@dataclasses.dataclass(slots=True)
class StepOnDevice:
    """See engine.model.runner.StartedStep."""

    read: Callable[[StepOnDevice], ModelOutput]
    sampled: SampledTokens | None = None
    unread: UnreadTokens | None = None  # the same tokens, for the next step
    pieces: list[PromptPiece] = dataclasses.field(default_factory=list)
    vectors: list[PooledVector] = dataclasses.field(default_factory=list)
    errors: dict[str, TandemError] = dataclasses.field(
        default_factory=dict
    )  # requests that were computed in vain
    # Where the step ends on the device, if reading its tokens does not wait for that: it has none to read.
    end: DeviceMark | None = None
    draft_limits: dict[str, int] | None = None  # see SchedulerOutput

    def finish(self) -> ModelOutput:
        return self.read(self)
