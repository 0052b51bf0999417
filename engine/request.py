"""A request as the scheduler sees it: its inputs, its tokens so far, and how many of them are computed."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Sequence

from tandem.engine.cache.hashing import BlockHasher
from tandem.wire.images import MediaFeature, salted
from tandem.wire.pooling import PoolingKind
from tandem.wire.requests import CachePeers, KVTransferParams, RequestFacts
from tandem.wire.sampling import FinishReason, SamplingParams


class RequestStatus(enum.IntEnum):
    """A request's state in the scheduler. The order matters: every status after PREEMPTED is final, and those between
    WAITING and RUNNING wait for an event."""

    WAITING = 1  # in line to run
    WAITING_FOR_GRAMMAR = 2  # its output's grammar is being compiled
    WAITING_FOR_REMOTE_KVS = 3  # a connector loads its KV, and may write to its blocks at any moment
    RUNNING = 4  # holds blocks, and steps compute its tokens
    PREEMPTED = 5  # ran, lost its blocks or was rewound, and waits to run again
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_ERROR = 9
    FINISHED_REPETITION = 10

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def is_blocked(self) -> bool:
        """The request waits for an event, such as its KV, and cannot be admitted before."""
        return RequestStatus.WAITING < self < RequestStatus.RUNNING


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.STOP,
}


def _reads_history(sampling: SamplingParams) -> bool:
    return bool(
        sampling.grammar is not None
        or sampling.bad_words
        or sampling.prompt_logprobs is not None
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


@dataclasses.dataclass(slots=True)
class DraftRecord:
    """How one request's drafts fared; newer drafts weigh more. `DraftJudge` reads and writes it."""

    # Accepted draft tokens, and drafts with a rejected token. The tokens after a rejected one prove nothing.
    right: float = 0.0
    wrong: float = 0.0
    skip: int = 0  # steps to pause after the last failed trial; doubles with each
    wait: int = 0  # steps left until the next draft
    in_vain: int = 0  # searches in a row that found no draft


class Request:
    """Identity and inputs never change; tokens are only appended; the scheduler owns the counters.

    `num_tokens` is a plain counter beside the list, because the step loop reads it for every running request.
    `num_computed_tokens` counts the leading tokens whose KV is in this node's cache, or will be after the step that is
    planned. The tokens from there to `num_tokens_with_spec` are left to compute: a prompt, a decode token or drafts.
    """

    __slots__ = (
        "_block_hashes",
        "all_token_ids",
        "allocation_horizon",
        "arrival_time",
        "block_hasher",
        "cache_peers",
        "drafting",
        "drafts_are_forced",
        "eos_token_ids",
        "facts",
        "grammar",
        "image_parts",
        "is_distrusted",
        "length_limit",
        "lost_load",
        "makes_up_load",
        "needs_its_last_token",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_initial_output_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "queue_seconds",
        "request_id",
        "sort_key",
        "spec_token_ids",
        "status",
        "stop_token_ids",
        "transfer",
        "valid_load_tokens",
    )

    def __init__(
        self,
        request_id: str,
        facts: RequestFacts,
        *,
        output_token_ids: Sequence[int] = (),
        arrival_time: float | None = None,
        transfer: KVTransferParams | None = None,
        cache_peers: CachePeers | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        block_hasher: BlockHasher | None = None,
    ) -> None:
        self.request_id = request_id
        self.facts = facts
        self.grammar: object = None  # keeps its compiled grammar: a step must never have to compile one
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.sort_key = (facts.priority, self.arrival_time, request_id)
        # The images' parts under the names of their rows; empty without images.
        self.image_parts = salted(facts.media, facts.cache_salt) if facts.embeds is None else ()
        self.transfer = transfer
        self.cache_peers = cache_peers
        self.eos_token_ids = eos_token_ids

        self.all_token_ids = [*facts.prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(facts.prompt_token_ids)
        self.num_tokens = len(self.all_token_ids)
        # Output tokens that another node sampled before the request came here. They are computed like prompt tokens.
        self.num_initial_output_tokens = len(output_token_ids)
        self.spec_token_ids: list[int] = []  # drafts to verify in the next step
        self.drafts_are_forced = False  # by the request's grammar
        self.drafting: DraftRecord | None = None

        self.num_computed_tokens = 0
        # 1 while the open step samples the next token: that token is counted and has a slot, but its id is not known yet.
        self.num_output_placeholders = 0
        self.num_external_tokens = 0  # tokens whose KV the connector promised to load
        # A load under way has failed for the tokens after these; None while nothing of it has failed.
        self.valid_load_tokens: int | None = None
        # What failed was the input of a request whose blocks this one found: it computes the rest, whatever
        # `transfer.on_failure` says of loads.
        self.makes_up_load = False
        # Prompt tokens that the prefix cache or a tier had when the request was first admitted; -1 before that.
        self.num_cached_tokens = -1
        self.queue_seconds = 0.0  # from arrival to first admission
        self.num_preemptions = 0
        # The request lost its blocks while it waited, so it loads no KV until it has run. Otherwise two requests that take
        # each other's blocks would load forever.
        self.lost_load = False

        self.status = RequestStatus.WAITING
        # Sampling reads the tokens so far on the host, so the next step cannot be planned before the last token is known.
        self.needs_its_last_token = _reads_history(facts.sampling)
        # `limit` sets these two when a scheduler accepts the request.
        self.length_limit = self.num_prompt_tokens + facts.sampling.max_tokens
        self.stop_token_ids: frozenset[int] = frozenset()
        # The KV in its blocks is of an earlier generation of the cache (`Lifecycle.begin_generation`): the request may finish, and
        # nothing of it is cached or stored. Blocks that it gets later, for all its tokens, are right again.
        self.is_distrusted = False
        # Up to this many tokens, the cache manager has nothing to allocate or to cache for the request.
        self.allocation_horizon = 0

        self.block_hasher: BlockHasher | None = None
        self._block_hashes: list[bytes] = []
        if block_hasher is not None:
            self.hash_with(block_hasher)

    def hash_with(self, hasher: BlockHasher) -> None:
        """Hashes the full blocks of the tokens so far, outside the step. Raises InvalidRequest for an id that is not a token."""
        hasher.extend(self._block_hashes, self)
        self.block_hasher = hasher

    def limit(self, context: int, eos_token_ids: frozenset[int]) -> None:
        """Fixes which tokens stop the request, and at how many tokens it ends. `context` is the most that one request may have."""
        self.length_limit = min(self.num_prompt_tokens + self.room_wanted, context)
        self.stop_token_ids = frozenset(self.facts.sampling.stop_token_ids)
        if not self.facts.sampling.ignore_eos:
            self.stop_token_ids |= self.eos_token_ids | eos_token_ids

    @property
    def lora(self) -> str | None:
        return self.facts.lora

    @property
    def when_idle(self) -> bool:
        return self.facts.when_idle

    @property
    def cache_salt(self) -> str | None:
        return self.facts.cache_salt

    @property
    def media(self) -> Sequence[MediaFeature]:
        """Parts of the prompt's images, or runs of its embeddings, in the prompt's order."""
        return self.facts.media

    @property
    def has_images(self) -> bool:
        return bool(self.facts.media) and self.facts.embeds is None

    @property
    def own_input_begins(self) -> int | None:
        """The first token whose KV depends on more than tokens: on an adapter, an image, or rows. The hashes of all blocks from
        there on name that input. None if there is none."""
        if self.facts.lora is not None:
            return 0
        return self.facts.media[0].offset if self.facts.media else None

    @property
    def room_wanted(self) -> int:
        """The most tokens that may follow the prompt: 0 for a request for a vector."""
        return self.facts.sampling.max_tokens if self.facts.pooling is None else 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """The chained hashes of all full blocks, extended on access to cover tokens that were appended since."""
        hasher = self.block_hasher
        if hasher is not None and self.num_tokens >= (len(self._block_hashes) + 1) * hasher.block_size:
            hasher.extend(self._block_hashes, self)
        return self._block_hashes

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether the whole prompt must be computed, though some of it is cached, because the client wants that or the answer needs
        it."""
        return self.facts.skip_reading_prefix_cache or self.reports_its_prompt

    @property
    def reports_its_prompt(self) -> bool:
        """Whether the answer needs more of the prompt's tokens than keys and values. The prompt's log-probabilities and hidden states
        come only from computing it, and every pooling kind but LAST needs hidden states of more tokens than the last one."""
        if self.facts.pooling is not None and self.facts.pooling.kind is not PoolingKind.LAST:
            return True
        return self.facts.sampling.prompt_logprobs is not None or self.facts.sampling.hidden_states is not None

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self.status)

    def append_output_token(self, token: int) -> None:
        self.all_token_ids.append(token)
        self.num_tokens += 1

    def __lt__(self, other: Request) -> bool:
        """More urgent: the lower priority number, then the earlier arrival, then the lower id. `id()` makes the order strict."""
        if self.sort_key != other.sort_key:
            return self.sort_key < other.sort_key
        return id(self) < id(other)

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.name} "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed>"
        )
