"""The worker half of a tier: has the planned copies made. It never waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from tandem.base.errors import ConfigurationError, InternalError
from tandem.kvtransfer.base import (
    ConnectorContext,
    ConnectorMetadata,
    ConnectorOutput,
    KVCacheMemory,
    SchedulerConnector,
    TransferStats,
    WorkerConnector,
)
from tandem.kvtransfer.offload.cpu import CpuTier
from tandem.kvtransfer.offload.disk import identity
from tandem.kvtransfer.offload.exchange import Exchange
from tandem.kvtransfer.offload.jobs import EndedJobs, TierPlan
from tandem.kvtransfer.offload.prefixes import Prefixes
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.kvtransfer.offload.sharing import TierSharing
from tandem.kvtransfer.offload.spec import Copy, LastingSpec, Tier, create_tier, find_tiers_of_ranks
from tandem.kvtransfer.sources import TierSources

MakeExchange = Callable[[ConnectorContext], Exchange]


class TierWorker(WorkerConnector):
    """Stores what a step computes while the next step runs. So the copies do not hold up what follows a forward
    pass, on which the next token depends."""

    def __init__(
        self,
        context: ConnectorContext,
        tier: Tier,
        make_exchange: MakeExchange | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_exchange`: other nodes read this tier, by what it makes."""
        self._context = context
        self._make_exchange = make_exchange
        self._clock = clock
        self._tier = tier
        self._plan = TierPlan()
        self._deferred: list[Copy] = []

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        self._tier.open(memory, self._context.wake)
        if self._make_exchange is not None and isinstance(self._tier.spec, CpuTier):
            exchange = self._make_exchange(self._context)
            exchange.open(msgspec.structs.replace(memory, tensor=self._tier.spec.places()))
            self._tier.sharing = _shared(self._context, memory, self._tier, exchange, self._clock)

    @property
    def tier_endpoint(self) -> str:
        return self._tier.sharing.endpoint if self._tier.sharing is not None else ""

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        if not isinstance(metadata, TierPlan):
            raise InternalError(f"metadata of another connector: {type(metadata).__name__}")
        self._plan = metadata

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
        sharing = self._tier.sharing
        stats = sharing.recorder.snapshot(sharing.malformed_frames) if sharing is not None else TransferStats()
        stats.tiers = [self._tier.status()]
        return stats

    def shutdown(self) -> None:
        self._tier.close()


def create_tiers(context: ConnectorContext) -> list[tuple[SchedulerConnector, WorkerConnector]]:
    """Makes one connector for each of `cache.tiers`, the nearest first. Raises ConfigurationError."""
    if context.state_blocks and any(config.block_factor > 1 for config in context.tiers):
        raise ConfigurationError(
            "cache.tiers: block_factor must be 1 for this model, which keeps recurrent states: they are right after one token "
            "alone, which lies within a larger block"
        )
    has_windows = any(group.window for group in context.groups)
    if has_windows and any(config.block_factor > 1 for config in context.tiers):
        raise ConfigurationError(
            "cache.tiers: block_factor must be 1 for this model, which has attention windows: a window begins within a "
            "larger block, and what lies before it in that block is gone"
        )
    tiers = find_tiers_of_ranks(context) if context.tier_lines else [create_tier(config) for config in context.tiers]
    if not Prefixes(context.groups, 1).needs_every_block:
        for spec in (tier.spec for tier in tiers):
            if isinstance(spec, LastingSpec) and spec.whole_prefixes_only:
                raise ConfigurationError(
                    f"cache.tiers: {spec.name} keeps prefixes of which every token is read, and this model has attention windows or "
                    "recurrent states: take cpu or disk"
                )
    return halves_of(tiers, context)


def halves_of(
    tiers: Sequence[Tier],
    context: ConnectorContext,
    clock: Callable[[], float] = time.monotonic,
    make_exchange: MakeExchange | None = None,
) -> list[tuple[SchedulerConnector, WorkerConnector]]:
    """Makes the connector of each of these tiers, the nearest first. `make_exchange`: how one is shared; None: over NIXL."""
    for tier in tiers:
        if isinstance(tier.spec, LastingSpec):
            tier.spec.recall = tier.recall = TierSources(context.sources)
    shares = context.remote or context.mirror
    shared = next((tier for tier in tiers if isinstance(tier.spec, CpuTier)), None) if shares else None
    make_exchange = make_exchange or _nixl_exchange
    return [
        (
            TierScheduler(context.groups, tier, clock),
            TierWorker(context, tier, make_exchange if tier is shared else None, clock),
        )
        for tier in tiers
    ]


def _nixl_exchange(context: ConnectorContext) -> Exchange:
    # Imported here, because nodes that share no tier do not need NIXL, and may not have it.
    from tandem.kvtransfer.nixl.options import NixlOptions
    from tandem.kvtransfer.nixl.transport import NixlAgent, NixlTransport

    is_nixl = context.config.connector == "nixl"
    options = NixlOptions.parse(context.config.options) if is_nixl else NixlOptions()
    transport = NixlTransport(NixlAgent(f"{context.node_id}-{context.epoch:x}-tier", options, context.host))
    return Exchange(context.node_id, context.epoch, context.host, transport, context.wake)


def _shared(
    context: ConnectorContext, memory: KVCacheMemory, tier: Tier, exchange: Exchange, clock: Callable[[], float]
) -> TierSharing:
    return TierSharing(
        tier.manager,
        exchange,
        Prefixes(context.groups, tier.block_factor),
        layout=identity(memory, tier.block_factor),
        block_factor=tier.block_factor,
        chunk_bytes=memory.block_bytes * tier.block_factor,
        chunk_tokens=memory.block_size * tier.block_factor,
        remote=context.remote,
        mirror=context.mirror,
        checksums=context.config.checksums,
        sources=context.sources.copied,
        clock=clock,
    )
