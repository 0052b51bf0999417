"""A node with an engine: one engine with its model, its connector and its service.

Prefill and decode nodes are subclasses that pass in their rules, and how to make a connector, which this package may not choose.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from tandem.base.errors import ConfigurationError, DeadlineExceeded, InternalError, NodeLost, Unavailable
from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.contract import NodeEngine
from tandem.engine.core import Engine
from tandem.engine.model.runner import ModelInfo, ModelRunner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.wings import Connect, EngineWing, other_engine
from tandem.kvtransfer.base import ConnectorContext, SchedulerConnector, WorkerConnector
from tandem.kvtransfer.config import LoadFailurePolicy, TierConfig, TransferConfig
from tandem.machine.resources import bind, core_quota, free_memory, resident_memory, threads_here
from tandem.node.config import NodeConfig
from tandem.node.loop import InStep, Item, Mailbox
from tandem.node.near import near_device
from tandem.node.node import LoadSource, Node, OpenChannel
from tandem.node.requests import RoleRules
from tandem.node.routers import CacheNewsSender, NamedBlocks
from tandem.node.service import NodeService, TellNews
from tandem.node.wings import OtherRanks, Publish, ranks_wing, wings
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import NodeMemory

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
        super().__init__(ranks_wing().of_first_rank(config) if config.ranks > 1 else config, rules.role, open_channel)
        self._whole = config
        self._rules = rules
        self._make_connector = make_connector
        self._engine: NodeEngine | None = None
        self._ranks: OtherRanks | None = None  # the node's other ranks; None: it has one rank
        # Each rank keeps the KV of its heads in its own memory, on CPUs too (on GPUs it always does). Set it before `start`.
        self.caches_apart = False

    def _start(self, loading: LoadSource) -> NodeInfo:
        config = self.config
        mailbox: Mailbox[Item] = Mailbox()
        other = other_engine(config.engine.model.engine)
        engine: NodeEngine
        if other is not None:
            engine = self._other_engine(other, loading, mailbox)
        else:
            engine = self._own_engine(loading, mailbox)
        self._engine, info = engine, engine.info
        channel = self._serve(
            lambda channel: NodeService(
                config,
                self.epoch,
                self._rules,
                engine,
                mailbox,
                channel,
                news=lambda tell, publishers: self._news(engine, tell, publishers),
                wings=wings(),
                memory=self._memory,
            )
        )
        return NodeInfo(
            node_id=config.node_id,
            role=self.role,
            epoch=self.epoch,
            request_endpoint=channel.endpoint,
            peer_endpoint=engine.peer_endpoint,
            model=config.engine.model.served_name or info.name,
            max_model_len=info.max_model_len,
            block_size=info.groups[0].block_size if info.groups else config.engine.cache.block_size,
            content=info.content,
            tokenizer=info.tokenizer,
            keeps_tokens=info.keeps_tokens,
            state_blocks=info.state_blocks,
            tier_endpoint=engine.tier_endpoint,
            mirrors=config.engine.cache.mirror,
            vectors=info.vectors,
            pin_seconds=config.engine.scheduler.pins_for_s,
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
            context_parallel=config.context_parallel,
        )

    def _own_engine(self, loading: LoadSource, mailbox: Mailbox[Item]) -> Engine:
        settings = self.config.engine
        runner = loading.runner or self._load(loading, mailbox)
        scheduler_half, worker_half = self._connector(runner, mailbox)
        return Engine(
            self._scheduler(runner.info, scheduler_half),
            runner,
            worker_half,
            ahead=settings.scheduler.plans_ahead(runner.info.device),
            debug=settings.debug,
        )

    def _other_engine(self, other: EngineWing, loading: LoadSource, mailbox: Mailbox[Item]) -> NodeEngine:
        config = self.config
        transfer = config.transfer

        def halves(
            groups: Sequence[KVCacheGroup], lines: Sequence[socket.socket]
        ) -> tuple[SchedulerConnector, WorkerConnector]:
            return self._make_connector(
                ConnectorContext(
                    node_id=config.node_id,
                    epoch=self.epoch,
                    host=config.host,
                    block_size=groups[0].block_size,
                    config=transfer or TransferConfig(),
                    wake=mailbox.wake,
                    state_blocks=groups[-1].blocks_per_request,
                    groups=groups,
                    rank_lines=lines,
                )
            )

        helpers = threads_here() if config.cores else []
        anywhere = os.sched_getaffinity(0) if config.cores else set()
        bind(helpers, config.cores)  # as in `_load`
        try:
            return other.make(
                config.engine,
                loading.model,
                loading.progress or (lambda what, fraction: None),
                Connect(halves, transfer.on_failure is LoadFailurePolicy.FAIL) if transfer is not None else None,
            )
        finally:
            bind(helpers, anywhere)

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
                near=near_device(info.device),
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
            load_failure_policy=config.transfer.on_failure if config.transfer else LoadFailurePolicy.RECOMPUTE,
            reads_images=info.images is not None,
            reads_hidden=info.reads_hidden,
            has_encoder=info.encoder is not None,
            is_timed=True,
        )

    def _news(self, engine: NodeEngine, tell: TellNews, publishers: list[Publish]) -> CacheNewsSender | None:
        cache, groups = self.config.engine.cache, engine.info.groups
        if not engine.caches_prefixes or not (cache.tell_routers or publishers):
            return None
        # Routers name blocks by all tokens from a prompt's first one on. A sliding window's group does not keep those blocks.
        whole = next((i for i, group in enumerate(groups) if group.keeps_every_token), None)
        cached = None
        if cache.tell_routers and whole is not None:
            cached = NamedBlocks(groups[whole].block_size, whole)
        engine.tell_cache_events()
        return CacheNewsSender(self.config.node_id, self.epoch, cached, tell, publishers)

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
        # Shared weights are a file's, whose memory counts as free.
        weights = runner.info.weight_bytes if runner.info.shares_weights else 0
        if wanted and wanted + kv_cache > (free := free_memory() - weights):
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
            self._ranks = ranks_wing().make(
                self._whole, loading, lambda why: mailbox.put(InStep(partial(_lose, why))), apart=self.caches_apart
            )
            runner = self._ranks.load()
        else:
            runner = load_runner(loading.model, config.engine.cache, config.engine.scheduler, loading.progress)
        bind(helpers, anywhere)
        if runner.kv_cache.device.type == "cpu":
            runner.pages = PageMaker(runner.kv_cache)
        return runner

    def set_adapters(self, folders: Mapping[str, str], kept: Collection[str], timeout_s: float) -> dict[str, str]:
        service = self._serving()
        slots = self._engine.adapters if self._engine is not None else None
        if slots is None:
            if folders:
                raise ConfigurationError("it serves no adapters: scheduler.max_loras is 0")
            return {}
        read = [slots.read(name, Path(folder)) for name, folder in folders.items()]
        if not service.set_adapters(read, frozenset(kept), timeout_s):
            raise DeadlineExceeded(f"{self.config.node_id} is in a step that takes longer than {timeout_s:.0f} s")
        return dict(slots.served)

    def _memory(self) -> NodeMemory | None:
        """What this process has. None if the engine is another one's, or its device keeps weights and KV."""
        engine = self._engine
        resident = resident_memory()
        if not isinstance(engine, Engine) or engine.info.device != "cpu" or resident is None:
            return None
        info, kv = engine.info, engine.runner.kv_in_memory
        return NodeMemory(info.weight_bytes, info.shares_weights, kv, max(0, resident - info.weight_bytes - kv))

    @property
    def _runner(self) -> ModelRunner:
        if self._engine is None:
            raise Unavailable(f"{self.config.node_id} has not started")
        if not isinstance(self._engine, Engine):
            raise InternalError(f"{self.config.node_id} runs {self.config.engine.model.engine}, and keeps its role")
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
