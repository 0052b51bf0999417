"""The half that has copies made. No method waits but `handle_preemptions`."""

from __future__ import annotations

from tandem.kvtransfer.base import (
    ConnectorContext,
    ConnectorMetadata,
    ConnectorOutput,
    KVCacheMemory,
    SchedulerConnector,
    TransferStats,
    WorkerConnector,
)
from tandem.kvtransfer.offload.scheduler_half import EndedJobs, TierPlan, TierScheduler
from tandem.kvtransfer.offload.spec import Copy, Tier, create_tier
from tandem.wire.errors import ConfigurationError, InternalError


class TierWorker(WorkerConnector):
    """What a step computes is stored while the next one runs. So the copies do not hold up what follows a forward pass, which
    the next token waits for."""

    def __init__(self, context: ConnectorContext, tier: Tier) -> None:
        self._context = context
        self._tier = tier
        self._plan = TierPlan()
        self._deferred: list[Copy] = []

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        self._tier.open(memory, self._context.wake)

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        if not isinstance(metadata, TierPlan):
            raise InternalError(f"metadata of another connector: {type(metadata).__name__}")
        self._plan = metadata

    def handle_preemptions(self) -> None:
        """Waits for the copies of blocks that are free now: this step may write to them."""
        if self._plan.preempted:
            self._submit_deferred()
            self._tier.mover.wait(self._plan.preempted)

    def start_load_kv(self) -> None:
        self._submit_deferred()
        if self._plan.stores or self._plan.loads:
            self._tier.mover.submit(self._plan.stores, self._plan.loads)

    def wait_for_save(self) -> None:
        self._deferred = self._plan.stores_after
        self._plan = TierPlan()

    def _submit_deferred(self) -> None:
        if self._deferred:
            self._tier.mover.submit(self._deferred, [])
            self._deferred = []

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        ended = self._tier.mover.take_ended()
        return ConnectorOutput(worker_metadata=EndedJobs(ended) if ended else None)

    def stats(self) -> TransferStats:
        return TransferStats(tiers=[self._tier.status()])

    def shutdown(self) -> None:
        self._tier.close()


def create_tiers(context: ConnectorContext) -> list[tuple[SchedulerConnector, WorkerConnector]]:
    """One connector for each of `cache.tiers`, the nearest first."""
    if context.state_blocks:
        raise ConfigurationError(
            "cache.tiers: this model keeps recurrent states, which are right after one token alone and are not found again "
            "by an earlier part of a prompt: there is nothing to go on from, so leave cache.tiers empty"
        )
    has_windows = any(group.window for group in context.groups)
    if has_windows and any(config.block_factor > 1 for config in context.tiers):
        raise ConfigurationError(
            "cache.tiers: block_factor must be 1 for this model, which has attention windows: a window begins within a "
            "larger block, and what lies before it in that block is gone"
        )
    tiers = [create_tier(config) for config in context.tiers]
    return [(TierScheduler(context.groups, tier), TierWorker(context, tier)) for tier in tiers]
