"""What the parts of the scheduler share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator

from tandem.engine.cache.encoder_cache import EncoderCache
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.config import SchedulerConfig
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.drafting import DraftJudge
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.engine.scheduling.pins import Pins
from tandem.engine.scheduling.queue import QueuePolicy
from tandem.engine.scheduling.stats import AnswerLengths, SchedulerStats, Totals
from tandem.engine.scheduling.waiting import WaitingRequests
from tandem.kvtransfer.base import SchedulerConnector
from tandem.kvtransfer.config import LoadFailurePolicy


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1  # what runs goes on, no request is admitted
    PAUSED_ALL = 2  # nothing is computed; transfers and cancellations go on


@dataclasses.dataclass(slots=True)
class SchedulerState:
    """Each unfinished request is in `requests` and in exactly one of `running` and `waiting`; a finished one
    whose blocks its connector still needs is in `held` alone, and one that keeps its blocks for its job's next turn in
    `pins` alone."""

    config: SchedulerConfig
    max_model_len: int  # of this engine: never more than the pool can hold for one request
    policy: QueuePolicy
    cache: KVCacheManager
    connector: SchedulerConnector | None
    load_failure_policy: LoadFailurePolicy
    clock: Callable[[], float]
    waiting: WaitingRequests
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)
    running: list[Request] = dataclasses.field(default_factory=list)  # in order of admission
    held: dict[str, Request] = dataclasses.field(default_factory=dict)
    pins: Pins | None = None  # None: the policy makes none
    encoded: EncoderCache | None = None  # None: the model reads no images
    judge: DraftJudge | None = None  # None: nothing is guessed
    pause: PauseState = PauseState.UNPAUSED
    totals: Totals = dataclasses.field(default_factory=Totals)
    answers: AnswerLengths = dataclasses.field(default_factory=AnswerLengths)
    # The step that was planned last, and the one that runs while the next is planned, if there is one.
    planned: SchedulerOutput | None = None
    open_step: SchedulerOutput | None = None
    # What the runner and the connector's worker half have not been told of yet.
    finished_req_ids: set[str] = dataclasses.field(default_factory=set)
    preempted_req_ids: set[str] = dataclasses.field(default_factory=set)
    # The last step could do nothing, and nothing has happened since that would let the next one do more.
    settled: bool = False

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """The content of these blocks is wrong: nothing may begin from it again. What a connector has kept may hold copies
        of it, and what was computed from them."""
        self.cache.uncache(blocks)
        if self.connector is not None:
            self.connector.reset_cache()

    def owners(self) -> Iterator[Request]:
        """Unfinished requests that have blocks: those that run, those that load, those in line that kept their
        KV."""
        yield from self.running
        yield from self.waiting.holders.values()
        for _, request in self.waiting.blocked.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                yield request

    def stats(self) -> SchedulerStats:
        """Costs a walk over all unfinished requests."""
        totals, pool = self.totals, self.cache.pool
        pinned = list(self.pins.by_job.values()) if self.pins is not None else []
        uncomputed = sum(
            max(request.num_prompt_tokens - request.num_computed_tokens, 0) for request in self.running
        )
        if self.encoded is not None:
            totals.encoder_tokens = self.encoded.encoded_tokens
            totals.encoder_tokens_reused = self.encoded.reused_tokens
            totals.encoder_tokens_received = self.encoded.received_tokens
        for name, value in dataclasses.asdict(pool.residency.totals).items():
            setattr(totals, name, value)
        return SchedulerStats(
            **totals.values(),
            running=len(self.running),
            waiting=len(self.waiting),
            blocked=len(self.waiting.blocked),
            waiting_tokens=uncomputed + self.waiting.num_uncomputed_tokens,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            total_blocks=pool.num_usable,
            held_blocks=sum(map(self.cache.num_blocks_of, self.held)),
            held_requests=len(self.held),
            pinned_requests=len(pinned),
            pinned_blocks=sum(self.cache.num_blocks_of_one(pin.request.request_id) for pin in pinned),
            wanted_blocks=self._wanted_blocks(),
            oldest_arrival=min((request.arrival_time for request in self.waiting), default=None),
            quarantined_blocks=len(pool.quarantined),
        )

    def _wanted_blocks(self) -> int:
        return sum(
            self.cache.num_blocks_until(
                request,
                request.num_tokens
                + self.answers.rest(request.num_output_tokens, request.length_limit - request.num_tokens),
            )
            for request in self.requests.values()
        )
