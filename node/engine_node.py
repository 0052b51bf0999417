"""A node with an engine: one engine with its model, its connector and its service.

Prefill and decode nodes are subclasses that pass in their rules, and how to make a connector, which this package may not choose.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from tandem.base.errors import ConfigurationError, DeadlineExceeded, InternalError, NodeLost, Unavailable
from tandem.engine.core import Engine
from tandem.engine.model.runner import ModelInfo, ModelRunner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.config import LoadFailurePolicy, TierConfig, TransferConfig
from tandem.machine.resources import bind, core_quota, free_memory, threads_here
from tandem.node.config import NodeConfig, refused_with_caches_apart, refused_with_ranks
from tandem.node.loop import InStep, Item, Mailbox
from tandem.node.node import LoadSource, Node, OpenChannel
from tandem.node.ranks.processes import shares_of, with_memory_shared
from tandem.node.ranks.supervisor import Ranks
from tandem.node.requests import RoleRules
from tandem.node.routers import CacheNewsDesk, NamedBlocks
from tandem.node.service import NodeService, TellNews
from tandem.node.wings import Publish, wings
from tandem.wire.nodes import NodeInfo

if TYPE_CHECKING:
    from tandem.engine.model.torch_runner import TorchRunner

logger = logging.getLogger(__name__)

MakeConnector = Callable[[ConnectorContext], tuple[SchedulerConnector, WorkerConnector]]


class EngineNode(Node[NodeService]):
    def __init__(
        self, config: NodeConfig, rules: RoleRules, open_channel: OpenChannel, make_connector: MakeConnector
    ) -> None:
        if core_quota() is not None:
            # Under a CPU quota only the number of threads matters. Do not bind them: the other containers of this machine would
            # bind theirs to the same cores, because each counts them from the first.
            config = msgspec.structs.replace(config, cores=[])
        super().__init__(_of_first_rank(config) if config.ranks > 1 else config, rules.role, open_channel)
        self._whole = config
        self._rules = rules
        self._make_connector = make_connector
        self._engine: Engine | None = None
        self._ranks: Ranks | None = None  # the node's other ranks; None: it has one rank
        # Each rank keeps the KV of its heads in its own memory, on CPUs too (on GPUs it always does). Set it before `start`.
        self.caches_apart = False

    def _start(self, loading: LoadSource) -> NodeInfo:
        config = self.config
        mailbox: Mailbox[Item] = Mailbox()
        runner = loading.runner or self._load(loading, mailbox)
        info = runner.info
        scheduler_half, worker_half = self._connector(runner, mailbox)
        scheduler = self._scheduler(info, scheduler_half)
        checked = config.transfer if self.role.writes_answers else None
        self._engine = engine = Engine(
            scheduler,
            runner,
            worker_half,
            ahead=config.engine.scheduler.plans_ahead(info.device),
            canary_share=checked.canary_share if checked is not None else 0.0,
            debug=config.engine.debug,
        )
        channel = self._serve(
            lambda channel: NodeService(
                config,
                self.epoch,
                self._rules,
                engine,
                mailbox,
                channel,
                news=lambda tell, publishers: self._news(scheduler, info, tell, publishers),
                wings=wings(),
            )
        )
        return NodeInfo(
            node_id=config.node_id,
            role=self.role,
            epoch=self.epoch,
            request_endpoint=channel.endpoint,
            peer_endpoint=worker_half.peer_endpoint if worker_half is not None else "",
            model=config.engine.model.served_name or info.name,
            max_model_len=info.max_model_len,
            block_size=config.engine.cache.block_size,
            content=info.content,
            tokenizer=info.tokenizer,
            keeps_tokens=info.keeps_tokens,
            state_blocks=info.state_blocks,
            tier_endpoint=worker_half.tier_endpoint if worker_half is not None else "",
            mirrors=config.engine.cache.mirror,
            vectors=info.vectors,
            pin_seconds=config.engine.scheduler.pins_for_s,
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
        )

    def _connector(
        self, runner: ModelRunner, mailbox: Mailbox[Item]
    ) -> tuple[SchedulerConnector, WorkerConnector] | tuple[None, None]:
        config, info = self.config, runner.info
        if config.transfer is None and not config.engine.cache.tiers:
            return None, None
        scheduler_half, worker_half = self._make_connector(
            ConnectorContext(
                node_id=config.node_id,
                epoch=self.epoch,
                host=config.host,
                block_size=config.engine.cache.block_size,
                config=config.transfer or TransferConfig(),
                wake=mailbox.wake,
                state_blocks=info.state_blocks,
                has_peers=config.transfer is not None,
                tiers=self._tiers(runner),
                groups=info.groups,
                remote=config.engine.cache.remote,
                mirror=config.engine.cache.mirror,
                rank_lines=self._ranks.transfer_lines if self._ranks is not None else (),
                tier_lines=self._ranks.tier_lines if self._ranks is not None else (),
            )
        )
        self._refuse_role(info, worker_half)
        return scheduler_half, worker_half

    def _scheduler(self, info: ModelInfo, connector: SchedulerConnector | None) -> Scheduler:
        config, settings = self.config, self.config.engine.scheduler
        return Scheduler(
            settings,
            config.engine.cache,
            groups=info.groups,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            connector=connector,
            load_failure_policy=config.transfer.on_failure
            if config.transfer
            else LoadFailurePolicy.RECOMPUTE,
            reads_images=info.images is not None,
            reads_hidden=info.reads_hidden,
        )

    def _news(
        self, scheduler: Scheduler, info: ModelInfo, tell: TellNews, publishers: list[Publish]
    ) -> CacheNewsDesk | None:
        cache = self.config.engine.cache
        if scheduler.block_hasher is None or not (cache.tell_routers or publishers):
            return None
        # Routers name blocks by all tokens from a prompt's first one on. A sliding window's group does not keep those blocks.
        whole = next((i for i, group in enumerate(info.groups) if group.keeps_every_token), None)
        cached = None
        if cache.tell_routers and whole is not None:
            cached = NamedBlocks(cache.block_size, whole)
        scheduler.tell_cache_events()
        return CacheNewsDesk(self.config.node_id, self.epoch, cached, tell, publishers)

    def _refuse_role(self, info: ModelInfo, worker_half: WorkerConnector) -> None:
        if not self.role.hands_over or not info.state_blocks or worker_half.hands_over_states:
            return
        worker_half.shutdown()
        raise ConfigurationError(
            f"{info.name} cannot be served with separate prefill and decode nodes by this connector: the model keeps recurrent "
            "states, which it does not hand over. Serve it with nodes that do both (--aggregated N), or take transfer.connector "
            "nixl or nccl"
        )

    def _tiers(self, runner: ModelRunner) -> list[TierConfig]:
        """The configured tiers. Raises ConfigurationError if this machine lacks the memory for them."""
        cache = self.config.engine.cache
        wanted = cache.host_bytes_of_tiers
        # A KV cache in host memory takes its pages only when they are first written, so free memory does not show it yet.
        kv_cache = runner.kv_cache.nbytes if wanted and runner.kv_cache.device.type == "cpu" else 0
        if wanted and wanted + kv_cache > (free := free_memory()):
            raise ConfigurationError(
                f"cache.tiers asks for {wanted >> 20} MiB of host memory, and {max(free - kv_cache, 0) >> 20} MiB are left "
                "beside this node's weights and KV cache: ask for less, or for fewer nodes on this machine"
            )
        return cache.tiers

    def _load(self, loading: LoadSource, mailbox: Mailbox[Item]) -> ModelRunner:
        # Imported here because the cluster imports this module too, and must not load torch.
        from tandem.engine.model.loading import load_runner
        from tandem.engine.model.prefault import PageMaker

        config = self.config
        # The model's threads, which are created while it loads, inherit this binding to the node's cores; the step thread binds
        # itself later. The other threads run anywhere, so that sending a token does not interrupt the next forward pass.
        helpers = threads_here() if config.cores else []
        anywhere = os.sched_getaffinity(0) if config.cores else set()
        bind(helpers, config.cores)
        if config.ranks > 1:
            runner = self._load_together(loading, mailbox)
        else:
            runner = load_runner(
                loading.model, config.engine.cache, config.engine.scheduler, loading.progress
            )
        bind(helpers, anywhere)
        if runner.kv_cache.device.type == "cpu":
            runner.pages = PageMaker(runner.kv_cache)
        return runner

    def _load_together(self, loading: LoadSource, mailbox: Mailbox[Item]) -> TorchRunner:
        from tandem.engine.model.loading import load_runner

        config, (model, _, progress, keepers) = self._whole, loading
        if len(keepers) != len(config.others):
            raise InternalError(
                f"{config.node_id} is spread over {config.machines} machines, and {len(keepers)} others keep ranks"
            )
        _refuse_beside_ranks(config, refused_with_ranks(config.engine, config.pipeline_parallel))
        engine = msgspec.structs.replace(config.engine, model=model)
        if config.machines > 1:
            engine = with_memory_shared(engine, config.ranks // config.machines)
        self._ranks = ranks = Ranks(
            config.node_id,
            config.ranks,
            engine,
            shares_of(config.cores, config.engine.model.threads, config.ranks // config.machines),
            config.logs,
            stages=config.pipeline_parallel,
            apart=self.caches_apart,
            host=config.host,
            keepers=keepers,
            silence_s=config.timeouts.rank_silence_s,
            lost=lambda why: mailbox.put(InStep(partial(_lose, why))),
            report=progress,
        )
        try:
            if progress is not None:
                progress(f"starting {config.ranks} ranks", 0.0)
            shard = ranks.start()
            if shard.kv_memory is None:
                _refuse_beside_ranks(config, refused_with_caches_apart(config))
            runner = load_runner(model, engine.cache, engine.scheduler, progress, shard=shard)
            if shard.kv_memory is None and runner.info.heads is None and config.transfer is not None:
                raise ConfigurationError(
                    f"{runner.info.name} cannot be served with separate prefill and decode nodes on {config.ranks} ranks whose KV lies "
                    "apart: its layers do not keep the same heads. Use pools.aggregated, or set tensor_parallel to 1"
                )
            ranks.await_ready()
        except Exception as error:
            # Another rank's end may have caused this rank's error: raise the cause.
            cause = ranks.cause_of(error)
            ranks.stop()
            if cause is error:
                raise
            raise cause from error
        return runner

    def set_adapters(
        self, folders: Mapping[str, str], kept: Collection[str], timeout_s: float
    ) -> dict[str, str]:
        service = self._serving()
        slots = self._runner.adapters
        if slots is None:
            if folders:
                raise ConfigurationError("it serves no adapters: scheduler.max_loras is 0")
            return {}
        read = [slots.read(name, Path(folder)) for name, folder in folders.items()]
        if not service.set_adapters(read, frozenset(kept), timeout_s):
            raise DeadlineExceeded(
                f"{self.config.node_id} is in a step that takes longer than {timeout_s:.0f} s"
            )
        return dict(slots.served)

    @property
    def _runner(self) -> ModelRunner:
        if self._engine is None:
            raise Unavailable(f"{self.config.node_id} has not started")
        return self._engine.runner

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
        if self._ranks is not None:
            self._ranks.stop()

    def release(self) -> ModelRunner:
        service = self._serving()
        if self._ranks is not None:
            raise InternalError(f"{self.config.node_id} has several ranks, and keeps its role")
        if service.failure is not None:
            raise InternalError(f"{self.config.node_id} has failed: {service.failure}")
        self.stop()
        if service.loop.is_alive:
            raise InternalError(f"{self.config.node_id}: its step thread does not end")
        self._runner.forget_requests()
        return self._runner


def _lose(why: str) -> NoReturn:
    """All other ranks of the node have been ended."""
    raise NodeLost(why)


def _of_first_rank(config: NodeConfig) -> NodeConfig:
    """The configuration of rank 0's process: with its share of the node's cores and threads."""
    share = shares_of(config.cores, config.engine.model.threads, config.ranks // config.machines)[0]
    model = msgspec.structs.replace(config.engine.model, threads=share.threads)
    engine = msgspec.structs.replace(config.engine, model=model)
    return msgspec.structs.replace(config, cores=share.cores, engine=engine)


def _refuse_beside_ranks(config: NodeConfig, reasons: Iterator[str]) -> None:
    """Raises ConfigurationError for the first reason. Each names a setting that rank 0 alone would follow."""
    if (reason := next(reasons, None)) is not None:
        raise ConfigurationError(f"a node of {config.ranks} ranks is asked for, but {reason}")
