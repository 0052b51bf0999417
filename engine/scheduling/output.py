"""The step's output to the model runner (`SchedulerOutput`) and the runner's answer (`ModelOutput`).

A request's data is sent once, when it first runs; later steps send only what changed. A resumed request was preempted and
has a new block table: it replaces the table and the tokens that the runner has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tandem.base.errors import TandemError
from tandem.kvtransfer.base import ConnectorMetadata
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import TokenLogprobs

BlockIds = list[list[int]]
"""For each KV cache group, block ids in token order."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderInput:
    """A part of an image that a step encodes, or whose rows have arrived."""

    identifier: str
    file: bytes  # the whole image file
    part: int
    length: int  # in tokens
    columns: int = 0  # see MediaFeature
    rows: PromptEmbeds | None = None  # from an encoder node; None: the vision tower here makes them


@dataclasses.dataclass(slots=True)
class NewRequestData:
    """A request that the runner has not seen before."""

    req_id: str
    facts: RequestFacts
    token_ids: list[int]  # the prompt and, for a request that began on another node, its output so far
    block_ids: BlockIds
    num_computed_tokens: int  # before this step
    image_parts: Sequence[MediaFeature] = ()  # under the names of their rows


@dataclasses.dataclass(slots=True)
class CachedRequestData:
    """Requests that the runner knows, as parallel lists in the order of scheduling."""

    req_ids: list[str] = dataclasses.field(default_factory=list)
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)  # before this step
    new_block_ids: list[BlockIds | None] = dataclasses.field(default_factory=list)  # None: no new ones
    # For these ids `new_block_ids` replaces the block table instead of growing it, and `resumed_token_ids` has the tokens.
    resumed_req_ids: set[str] = dataclasses.field(default_factory=set)
    resumed_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class SchedulerOutput:
    """One planned step: what the runner and the connector's worker half need for it."""

    new_reqs: list[NewRequestData]
    cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]  # in scheduling order
    total_num_scheduled_tokens: int
    spec_token_ids: dict[str, list[int]]  # drafts to verify, already counted in num_scheduled_tokens
    finished_req_ids: set[str]  # those that ended since the last step: the runner forgets them
    preempted_req_ids: set[str]
    # (from, to) blocks of recurrent states to copy before the forward pass.
    state_copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    # Checkpoint blocks among `state_copies`. No request may take them before the step is booked.
    checkpoint_blocks: list[int] = dataclasses.field(default_factory=list)
    # Parts of images to encode before the forward pass, and parts whose rows the runner drops before that.
    encoder_inputs: list[EncoderInput] = dataclasses.field(default_factory=list)
    forgotten_media: list[str] = dataclasses.field(default_factory=list)
    forced_req_ids: set[str] = dataclasses.field(default_factory=set)  # whose drafts a grammar forces
    # How many draft tokens each request may get after this step; requests without an entry get none. None: no limit.
    draft_limits: dict[str, int] | None = None
    # The scheduled tokens of requests that get more than one and have no drafts.
    num_prompt_tokens: int = 0
    # The connector writes to blocks as soon as it gets this plan, because a request begins to load its KV.
    begins_loads: bool = False
    # This step computes a request whose KV is still being loaded. Whether the load succeeded is known only after the step.
    reads_loads: bool = False
    # The step was planned while another one was open, and found too few blocks. Requests are preempted when that one is booked.
    ran_short: bool = False
    # Requests that ended or were interrupted after planning: what this step computes for them is void.
    void_req_ids: set[str] = dataclasses.field(default_factory=set)
    connector_metadata: ConnectorMetadata | None = None
    _grown: dict[str, BlockIds] | None = dataclasses.field(default=None, repr=False, compare=False)

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        """The blocks that a running request got in this step (`kvtransfer.base.ScheduledStep`).

        Empty for a new or resumed request, whose whole table `update_state_after_alloc` gave to the connector.
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
    """What the runner computed in a step.

    `sampled_token_ids[id]` has one token for a request whose newest token was computed, and more when drafts were accepted. It
    is empty or absent while the prompt is not finished. A request in `errors` has no entry: it cannot go on.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = dataclasses.field(default_factory=dict)
    # Drafts for the next step to verify.
    draft_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    forced_req_ids: set[str] = dataclasses.field(default_factory=set)  # as in SchedulerOutput
    drafting_s: float = 0.0  # seconds that finding the drafts took
    guess_s: float = 0.0  # seconds that a draft model took for each token
    # Little-endian float32, for requests with `pooling` whose tokens are all computed.
    vectors: dict[str, bytes] = dataclasses.field(default_factory=dict)
    # Requests that can get no next token, or no vector, and why.
    errors: dict[str, TandemError] = dataclasses.field(default_factory=dict)
