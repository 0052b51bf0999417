"""Starts the other ranks of a node, and loads all parts of its model. The node knows it as `node.wings.RanksWing`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tandem.base.errors import ConfigurationError, InternalError
from tandem.node.config import NodeConfig, refused_with_caches_apart, refused_with_ranks
from tandem.node.node import LoadSource
from tandem.node.ranks.keeper import FindModel, RankKeeper
from tandem.node.ranks.processes import shares_of, with_memory_shared
from tandem.node.ranks.supervisor import Ranks

if TYPE_CHECKING:
    from tandem.engine.model.torch_runner import TorchRunner


def of_first_rank(config: NodeConfig) -> NodeConfig:
    share = shares_of(config.cores, config.engine.model.threads, config.ranks // config.machines)[0]
    model = msgspec.structs.replace(config.engine.model, threads=share.threads)
    engine = msgspec.structs.replace(config.engine, model=model)
    return msgspec.structs.replace(config, cores=share.cores, engine=engine)


def make(config: NodeConfig, loading: LoadSource, lost: Callable[[str], None], *, apart: bool) -> RanksOfNode:
    return RanksOfNode(config, loading, lost, apart)


def keep(config: NodeConfig, machine: int, find_model: FindModel) -> RankKeeper:
    return RankKeeper(config, machine, find_model)


class RanksOfNode:
    def __init__(self, config: NodeConfig, loading: LoadSource, lost: Callable[[str], None], apart: bool) -> None:
        if len(loading.keepers) != len(config.others):
            raise InternalError(
                f"{config.node_id} is spread over {config.machines} machines, and {len(loading.keepers)} others keep ranks"
            )
        _refuse(config, refused_with_ranks(config.engine, config.pipeline_parallel, config.context_parallel))
        self._config = config
        self._loading = loading
        engine = msgspec.structs.replace(config.engine, model=loading.model)
        if config.machines > 1:
            engine = with_memory_shared(engine, config.ranks // config.machines)
        self._engine = engine
        self._ranks = Ranks(
            config.node_id,
            config.ranks,
            engine,
            shares_of(config.cores, config.engine.model.threads, config.ranks // config.machines),
            config.logs,
            stages=config.pipeline_parallel,
            contexts=config.context_parallel,
            apart=apart,
            host=config.host,
            keepers=loading.keepers,
            silence_s=config.timeouts.rank_silence_s,
            lost=lost,
            report=loading.progress,
        )

    def load(self) -> TorchRunner:
        from tandem.engine.model.loading import load_runner

        config, ranks, engine, progress = self._config, self._ranks, self._engine, self._loading.progress
        try:
            if progress is not None:
                progress(f"starting {config.ranks} ranks", 0.0)
            shard = ranks.start()
            if shard.kv_memory is None:
                _refuse(config, refused_with_caches_apart(config))
            runner = load_runner(self._loading.model, engine.cache, engine.scheduler, progress, shard=shard)
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

    @property
    def transfer_lines(self) -> Sequence[socket.socket]:
        return self._ranks.transfer_lines

    @property
    def tier_lines(self) -> Sequence[socket.socket]:
        return self._ranks.tier_lines

    @property
    def pids(self) -> list[int]:
        return self._ranks.pids

    def stop(self) -> None:
        self._ranks.stop()


def _refuse(config: NodeConfig, reasons: Iterator[str]) -> None:
    """Raises ConfigurationError for the first reason. Each names a setting that rank 0 alone would follow."""
    if (reason := next(reasons, None)) is not None:
        raise ConfigurationError(f"a node of {config.ranks} ranks is asked for, but {reason}")
