"""What one step computes (scheduler -> model) and what came of it (model -> scheduler).

A request's data is sent once, when it first runs; afterwards only what changed. A resumed request (it was
preempted, and its blocks are all new) sends everything again and replaces what the model runner knew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tandem.engine.cache.encoder_cache import EncoderInput
from tandem.kvtransfer.base import ConnectorMetadata
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.errors import TandemError
from tandem.wire.images import MediaFeature
from tandem.wire.pooling import Pooling
from tandem.wire.sampling import SamplingParams, TokenLogprobs

BlockIds = list[list[int]]
"""For each KV cache group, block ids in token order."""


@dataclasses.dataclass(slots=True)
class NewRequestData:
    """A request that the runner has not seen before."""

    req_id: str
    token_ids: list[
        int
    ]  # prompt and, for a request that began elsewhere or was handed over, its output so far
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int  # before this step
    lora: str | None = None
    pooling: Pooling | None = None  # its vector is wanted, and no token
    media: Sequence[MediaFeature] = ()  # parts of its images
    embeds: PromptEmbeds | None = None


@dataclasses.dataclass(slots=True)
class CachedRequestData:
    """Requests that the runner knows, as parallel lists. Order is the order of scheduling."""

    req_ids: list[str] = dataclasses.field(default_factory=list)
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)  # before this step
    new_block_ids: list[BlockIds | None] = dataclasses.field(default_factory=list)  # None: none in this step
    # For these ids `new_block_ids` replaces the block table instead of growing it, and the token ids follow.
    resumed_req_ids: set[str] = dataclasses.field(default_factory=set)
    resumed_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class SchedulerOutput:
    new_reqs: list[NewRequestData]
    cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]  # in scheduling order
    total_num_scheduled_tokens: int
    spec_token_ids: dict[str, list[int]]  # drafts to verify, already counted in num_scheduled_tokens
    finished_req_ids: set[str]  # ended since the last step: the runner forgets them
    preempted_req_ids: set[str]
    new_block_ids_to_zero: list[int] = dataclasses.field(default_factory=list)
    # Blocks of recurrent states that are copied before anything is computed, and after zeroing: (from, to).
    state_copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    # Those of them that are checkpoints: nothing else uses them before the step is booked.
    checkpoint_blocks: list[int] = dataclasses.field(default_factory=list)
    # Parts of images: those that are encoded before anything is computed, and those whose rows are forgotten before that.
    encoder_inputs: list[EncoderInput] = dataclasses.field(default_factory=list)
    forgotten_media: list[str] = dataclasses.field(default_factory=list)
    # How many tokens may be guessed after this step; who is not named: none. None: as many as the runner can.
    draft_limits: dict[str, int] | None = None
    num_prompt_tokens: int = 0  # of all, for requests that are more than one token behind
    # A connector writes to blocks of this plan as soon as it gets it: to those of a request that waits for its load.
    begins_loads: bool = False
    # The same for a request that this step computes: whether its load was complete is known when the step is over.
    reads_loads: bool = False
    # Planned while another step ran, it found too few blocks: who gives up theirs is decided when that one is booked.
    ran_short: bool = False
    # Ended or were interrupted since it was planned: nothing that it computes is theirs.
    void_req_ids: set[str] = dataclasses.field(default_factory=set)
    connector_metadata: ConnectorMetadata | None = None
    _grown: dict[str, BlockIds] | None = dataclasses.field(default=None, repr=False, compare=False)

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """Blocks that a request already running got in this step (`kvtransfer.base.ScheduledStep`).

        Those of a new or resumed request are not among them: `update_state_after_alloc` told of its whole table.
        """
        if self._grown is None:
            cached = self.cached_reqs
            self._grown = {
                req_id: blocks
                for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
                if blocks is not None and req_id not in cached.resumed_req_ids
            }
        return self._grown.get(request_id, ())


@dataclasses.dataclass(slots=True)
class ModelOutput:
    """What the model made of a step.

    `sampled_token_ids[id]` holds one token for a request whose last scheduled token was its newest, more when
    drafts were accepted, and nothing (or no entry) for one whose prompt is not finished. A request in `errors` has no
    entry: nothing right can come of it any more.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = dataclasses.field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = dataclasses.field(
        default_factory=dict
    )  # proposals for the next step
    drafting_s: float = 0.0  # that looking for them took
    guess_s: float = 0.0  # that each of their tokens took a draft model
    # For requests with `pooling` whose tokens are all computed: float32, the lowest byte first.
    vectors: dict[str, bytes] = dataclasses.field(default_factory=dict)
    # Those that can have no next token, or no vector, and why.
    errors: dict[str, TandemError] = dataclasses.field(default_factory=dict)
