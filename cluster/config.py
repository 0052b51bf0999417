"""Everything that `tandem.yaml` can say. Plain, frozen, with a default for all of it."""

from __future__ import annotations

import msgspec

from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.kvtransfer.base import TransferConfig
from tandem.node.config import NodeTimeouts
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role

DEFAULT_MODEL = "smollm2"

# Far beyond what anyone runs, and what the code that counts nodes and waits can bear.
MOST_NODES = 10_000  # of one pool
LONGEST_S = 1_000_000.0


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`pools.prefill: 2` is short for `pools.prefill.nodes: 2`."""

    nodes: int | None = 0  # to begin with; null: one for every place that machines offer, as they come and go
    threads: int | None = None  # cores per node; None: an equal share of the machine's
    # What Ray sets aside for each node, besides one of the role's own resource: {GPU: 1}. Only on a cluster.
    resources: dict[str, float] = {}
    min: int = 0  # never fewer
    max: int | None = None  # never more; with it the pool is scaled by its load, between the two

    @property
    def first_size(self) -> int:
        """On one machine, which offers as many places as anyone asks for."""
        return 1 if self.nodes is None else self.nodes

    @property
    def last_size(self) -> int:
        """As large as it may become by itself."""
        return max(self.first_size, self.max or 0)


class PoolsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: PoolConfig = PoolConfig(nodes=1)
    decode: PoolConfig = PoolConfig(nodes=1)
    aggregated: PoolConfig = PoolConfig()  # instead of the two: nodes that do both
    # Of one machine, where no places are offered: more are refused. Four is the least layout that can lose a node of
    # each pool, on a single core; beyond that nodes only take time from one another.
    nodes_per_core: int = 4

    def of(self, role: Role) -> PoolConfig:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.AGGREGATED: self.aggregated}[role]

    @property
    def total(self) -> int:
        return sum(self.of(role).first_size for role in Role)


class SloConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What users are to feel. Pools with a `max` are scaled to keep it."""

    ttft_s: float = 2.0  # from a request to its first token
    inter_token_s: float = 0.1  # between two tokens of an answer


class AutoscalingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    period_s: float = 1.0  # between two looks
    grow_after_s: float = 10.0  # of breaking the SLO
    shrink_after_s: float = 120.0  # of having room to spare
    settle_s: float = 15.0  # after a change, before what is measured counts again


class ClusterTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the controller waits, and when it gives up on whom."""

    start_s: float = 300.0  # for one node to fetch what it lacks of its model, load it and answer
    heartbeat_s: float = 0.5  # between two questions to a node
    silence_s: float = 2.0  # for an answer; one that comes later is none
    unresponsive_s: float = 15.0  # silent for this long: ended and replaced
    step_s: float = 120.0  # one engine step longer than this is a wedged engine: ended and replaced
    restart_backoff_s: float = 0.5  # before the first restart; doubles up to `restart_backoff_max_s`
    restart_backoff_max_s: float = 15.0
    stop_s: float = 10.0  # for one process to end after it was told to
    machines_s: float = 900.0  # at start, for the machines that the first nodes need
    nodes: NodeTimeouts = NodeTimeouts()


class TandemConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model: NAME` is short for `model.path: NAME`."""

    model: ModelConfig = ModelConfig(path=DEFAULT_MODEL)
    pools: PoolsConfig = PoolsConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    router: RouterConfig = RouterConfig(tokenizer_path=DEFAULT_MODEL, model_name=DEFAULT_MODEL)
    transfer: TransferConfig = TransferConfig()
    slo: SloConfig = SloConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    timeouts: ClusterTimeouts = ClusterTimeouts()
    debug: bool = False  # every engine audits its invariants whenever it is idle

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(model=self.model, cache=self.cache, scheduler=self.scheduler, debug=self.debug)


# What a plain value means where a section stands.
SHORTHANDS: dict[type[msgspec.Struct], str] = {ModelConfig: "path", PoolConfig: "nodes"}

# Follow from the model when it is known; nobody can set them.
DERIVED: dict[tuple[str, ...], str] = {
    ("router", "tokenizer_path"): "it follows from model.path",
    ("router", "model_name"): "set model.served_name instead",
}
