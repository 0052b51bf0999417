"""A request as the scheduler sees it: what was asked, the tokens so far, how far it has been computed."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Sequence

from tandem.engine.cache.hashing import BlockHasher
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.pooling import Pooling, PoolingKind
from tandem.wire.requests import CachePeers, KVTransferParams
from tandem.wire.sampling import FinishReason, SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request stands. The order carries meaning: everything after PREEMPTED is an end."""

    WAITING = 1  # for its turn
    WAITING_FOR_GRAMMAR = 2  # its output's grammar is being compiled
    WAITING_FOR_REMOTE_KVS = 3  # a peer may write to its blocks at any moment
    RUNNING = 4  # holds blocks and gets tokens computed
    PREEMPTED = 5  # ran, lost its blocks, and waits to run again
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_IGNORED = 9  # too long to have ever run
    FINISHED_ERROR = 10
    FINISHED_REPETITION = 11

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def is_blocked(self) -> bool:
        """Waits for an event, not for its turn."""
        return RequestStatus.WAITING < self < RequestStatus.RUNNING


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
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
    """What became of one request's drafts, the newest counting most."""

    right: float = 0.0
    wrong: float = 0.0  # drafts of which a token was wrong: those after it say nothing
    skip: int = 0  # steps without a trial, after the last one failed
    wait: int = 0  # steps until something is guessed again
    in_vain: int = 0  # searches in a row that found nothing


class Request:
    """Identity and inputs never change; tokens only grow; the counters are the scheduler's.

    Tokens are plain counts kept beside the list, not properties over it: the step loop reads them for every
    running request. `num_computed_tokens` says how many leading tokens have their KV in this node's cache, and
    the gap from there to `num_tokens_with_spec` is what is left to compute: a prompt, a decode or drafts.
    """

    __slots__ = (
        "_block_hashes",
        "all_token_ids",
        "allocation_horizon",
        "arrival_time",
        "block_hasher",
        "cache_peers",
        "cache_salt",
        "drafting",
        "embeds",
        "eos_token_ids",
        "images",
        "is_last_step",
        "job_id",
        "length_limit",
        "lora",
        "lost_load",
        "media",
        "needs_its_last_token",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_initial_output_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "pooling",
        "priority",
        "queue_seconds",
        "request_id",
        "sampling",
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
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        output_token_ids: Sequence[int] = (),
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        media: Sequence[MediaFeature] = (),
        images: Sequence[bytes] = (),
        embeds: PromptEmbeds | None = None,
        transfer: KVTransferParams | None = None,
        cache_peers: CachePeers | None = None,
        pooling: Pooling | None = None,
        job_id: str | None = None,
        is_last_step: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
        block_hasher: BlockHasher | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.priority = priority
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.sort_key = (priority, self.arrival_time, request_id)
        self.cache_salt = cache_salt
        self.lora = lora
        self.media = media  # in the prompt's order: parts of its images, or runs of its `embeds`
        self.images = images  # the files that `media` are parts of
        self.embeds = embeds  # in the place of the whole prompt's tokens
        self.transfer = transfer
        self.cache_peers = cache_peers
        self.pooling = pooling  # it ends with a vector of its prompt, and samples nothing
        self.job_id = job_id  # the agent's work that it is a turn of
        self.is_last_step = is_last_step  # of that job
        self.eos_token_ids = eos_token_ids

        self.all_token_ids = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(self.all_token_ids)
        # Output tokens that the request brought from another node. They are computed as part of a prompt.
        self.num_initial_output_tokens = len(output_token_ids)
        self.spec_token_ids: list[int] = []  # drafts, to be verified in the next step
        self.drafting: DraftRecord | None = None  # what became of its drafts so far

        self.num_computed_tokens = 0
        self.num_output_placeholders = 0  # tokens of the open step, which is still under way
        self.num_external_tokens = 0  # promised by the connector
        self.valid_load_tokens: int | None = None  # a load under way has overwritten all tokens after these
        self.num_cached_tokens = -1  # found in the prefix cache when first admitted; -1 before
        self.queue_seconds = 0.0  # from its arrival until it was first admitted
        self.num_preemptions = 0
        # Its blocks were taken while it stood in line. It loads nothing before it has run: two requests that take each other's
        # blocks would load for ever.
        self.lost_load = False

        self.status = RequestStatus.WAITING
        # The next token depends on the tokens so far on the host, so its steps cannot be planned ahead.
        self.needs_its_last_token = _reads_history(sampling)
        # Set by `limit`, when a scheduler accepts the request.
        self.length_limit = self.num_prompt_tokens + sampling.max_tokens
        self.stop_token_ids: frozenset[int] = frozenset()
        # While its tokens end here or before, the cache manager has nothing to allocate or to cache for it.
        self.allocation_horizon = 0

        self.block_hasher: BlockHasher | None = None
        self._block_hashes: list[bytes] = []
        if block_hasher is not None:
            self.hash_with(block_hasher)

    def hash_with(self, hasher: BlockHasher) -> None:
        """Hashes the tokens there are, so that no step has to. Raises InvalidRequest for an id that is not a token."""
        hasher.extend(self._block_hashes, self)
        self.block_hasher = hasher

    def limit(self, context: int, eos_token_ids: frozenset[int]) -> None:
        """Fixes how the request ends: which tokens stop it, and at how many it is full."""
        self.length_limit = min(self.num_prompt_tokens + self.room_wanted, context)
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos:
            self.stop_token_ids |= self.eos_token_ids | eos_token_ids

    @property
    def has_images(self) -> bool:
        return bool(self.media) and self.embeds is None

    @property
    def room_wanted(self) -> int:
        """Tokens beyond its prompt, at most."""
        return self.sampling.max_tokens if self.pooling is None else 0

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
        """The chained hashes of all full blocks of tokens, caught up with the tokens when they are asked for."""
        hasher = self.block_hasher
        if hasher is not None and self.num_tokens >= (len(self._block_hashes) + 1) * hasher.block_size:
            hasher.extend(self._block_hashes, self)
        return self._block_hashes

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Log-probabilities of the prompt come only from computing it. So do hidden states that are wanted in a file, or of which a vector
        is made, but for the last token's: a cached block holds keys and values alone."""
        if self.pooling is not None and self.pooling.kind is not PoolingKind.LAST:
            return True
        return self.sampling.prompt_logprobs is not None or self.sampling.hidden_states is not None

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
        """More urgent: lower priority number, then earlier arrival, then id; identity makes it strict."""
        if self.sort_key != other.sort_key:
            return self.sort_key < other.sort_key
        return id(self) < id(other)

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.name} "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed>"
        )
