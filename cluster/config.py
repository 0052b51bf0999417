"""Every setting of `tandem.yaml`, as frozen structs with defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tandem.base.logs import LogsConfig
from tandem.base.settings import END, AtLeastOne, Seconds, about, fixed
from tandem.cluster.roles import TRAITS
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.node.config import AnswersConfig, NodeTimeouts
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role

DEFAULT_MODEL = "smollm2"
DEFAULT_NAME = "tandem"

# Of one pool: far more than any cluster has, and few enough for the code that counts nodes
MOST_NODES = 10_000
MOST_RANKS = 16  # of one node
NodeCount = Annotated[int, Meta(ge=0, le=MOST_NODES)]

# A pool may override these sections, except the settings listed here: they decide whether blocks fit each other, or routers rely on them.
OF_ALL_POOLS = {
    "cache": ("dtype", "hash_algorithm", "hash_seed", "tell_routers", "events", "remote", "mirror"),
    "scheduler": ("policy", "max_model_len", "max_loras"),
}


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`pools.prefill: 2` is short for `pools.prefill.nodes: 2`."""

    nodes: Annotated[
        NodeCount | None,
        about("nodes at the start; `null`: one for each place that machines offer, as they come and go"),
    ] = 0
    threads: Annotated[AtLeastOne | None, about("cores of each node; `null`: an equal share of its machine's")] = None
    tensor_parallel: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_RANKS)],
        about(
            "ranks of each node, which share the model's weights and KV; on GPUs one device each, such as with `resources: "
            "{GPU: 2}`: [ranks](ranks.md)"
        ),
    ] = 1
    pipeline_parallel: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_RANKS)],
        about(
            "stages of each node, each with some of the model's layers and `tensor_parallel` ranks: [ranks](ranks.md#stages)"
        ),
    ] = 1
    context_parallel: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_RANKS)],
        about(
            "ranks of each node that read a prompt together, each some of its tokens: so many times `tensor_parallel`: "
            "[ranks](ranks.md#long-prompts)"
        ),
    ] = 1
    machines: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_RANKS)],
        about(
            "machines over which each node's ranks are spread, the same number on each; each machine needs a place for the "
            "node. On a Ray cluster only: [ranks](ranks.md#several-machines)"
        ),
    ] = 1
    resources: Annotated[
        dict[str, Annotated[float, Meta(gt=0)]],
        about(
            "what Ray sets aside for each node, such as `{GPU: 1}`, besides a place; a node's machines give equal parts. On a "
            "Ray cluster only"
        ),
    ] = {}
    label_selector: Annotated[
        dict[str, str],
        about(
            "labels of the machines that this pool's nodes run on, as in Ray: `{ray.io/accelerator-type: H100}`, and `!VALUE`, "
            "`in(A, B)`, `!in(A, B)`. On a Ray cluster only"
        ),
    ] = {}
    env: Annotated[
        dict[str, str],
        about(
            "environment variables of each node's process, such as `{UCX_NET_DEVICES: mlx5_0:1}`; no secrets: Ray shows them"
        ),
    ] = {}
    transfer_options: Annotated[
        dict[str, str], about("`transfer.options` of this pool's nodes; these override those of all nodes")
    ] = {}
    cache: Annotated[
        dict[str, Any],
        about(
            "this pool's own settings of `cache`, such as `{memory_bytes: 4GiB}`, except those that all nodes must share"
        ),
    ] = {}
    scheduler: Annotated[
        dict[str, Any],
        about("this pool's own settings of `scheduler`, such as `{max_num_seqs: 64}`, with the same exception"),
    ] = {}
    engine_args: Annotated[
        dict[str, Any],
        about(
            "`model.engine_args` of this pool's nodes, such as `{enforce_eager: true}` for prefill alone; these override those of all nodes"
        ),
    ] = {}
    min: Annotated[NodeCount, about("fewest nodes")] = 0
    max: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_NODES)] | None, about("most nodes; with it the pool is scaled by its load")
    ] = None

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def ranks_per_machine(self) -> int:
        return self.ranks // self.machines

    @property
    def resources_per_machine(self) -> dict[str, float]:
        return {name: amount / self.machines for name, amount in self.resources.items()}

    @property
    def first_size(self) -> int:
        """The size at the start on a single machine, which offers any number of places."""
        return 1 if self.nodes is None else self.nodes

    @property
    def last_size(self) -> int:
        """The largest size that the pool can reach by itself."""
        return max(self.first_size, self.max or 0)


class PoolsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: PoolConfig = PoolConfig(nodes=TRAITS[Role.PREFILL].nodes)
    decode: PoolConfig = PoolConfig(nodes=TRAITS[Role.DECODE].nodes)
    # Instead of prefill and decode nodes: nodes that do both
    aggregated: PoolConfig = PoolConfig(nodes=TRAITS[Role.AGGREGATED].nodes)
    encode: PoolConfig = PoolConfig()  # besides either layout, for a model that reads images
    # Nodes that may share one core of a machine that offers no places; more are refused. Four is the smallest layout that can
    # lose a node of each pool, on a single core; further nodes only take time from each other.
    nodes_per_core: Annotated[
        AtLeastOne,
        fixed(
            "nodes that take turns on one core of a machine; four is the smallest layout that can lose a node of each pool, and further nodes only take time from each other"
        ),
    ] = 4

    def of(self, role: Role) -> PoolConfig:
        pool: PoolConfig = getattr(self, role.value)
        return pool

    @property
    def total(self) -> int:
        return sum(self.of(role).first_size for role in Role)


class SloConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The targets for users' latency. Pools with a `max` are scaled to meet them."""

    ttft_s: Annotated[
        Seconds, about("seconds to the first token that users should feel; half of them may be waiting")
    ] = 2.0
    inter_token_s: Annotated[Seconds, about("seconds between two tokens of an answer that users should feel")] = 0.1


class AutoscalingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    period_s: Annotated[Seconds, fixed("between two looks at the load")] = 1.0
    grow_after_s: Annotated[
        Seconds,
        fixed("that `slo` is broken before a pool grows: less would follow chance, and more would let users wait"),
    ] = 20.0
    shrink_after_s: Annotated[
        Seconds,
        about("seconds before a pool shrinks that is nearly idle; one with room to spare takes ten times as long"),
    ] = 120.0
    settle_s: Annotated[
        Seconds, fixed("after a change before measurements count again: they are of the pool before it")
    ] = 15.0


class RolloutConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How `tandem apply` replaces the nodes of each pool."""

    surge: Annotated[NodeCount, about("nodes beyond the pool's size while new ones replace old ones")] = 1
    max_unavailable: Annotated[
        NodeCount | None,
        about(
            "nodes below the pool's size while new ones replace old ones; `null`: none, unless no machine has room for "
            "another node, then 1 in a pool that can do without one"
        ),
    ] = None
    settle_s: Annotated[
        Seconds,
        fixed(
            "seconds that a new node must have served before an old one goes for it; what fails at once has failed by then"
        ),
    ] = 5.0


class ClusterTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the controller waits for what, and when it replaces a process."""

    start_s: Annotated[Seconds, about("a process that downloads or loads without progress for this long is ended")] = (
        300.0
    )
    heartbeat_s: Annotated[Seconds, fixed("between the controller's questions to a node")] = 0.5
    silence_s: Annotated[
        Seconds,
        fixed(
            "for a node's answer to the controller; a later answer counts as silence, which `timeouts.unresponsive_s` bounds"
        ),
    ] = 2.0
    unresponsive_s: Annotated[Seconds, about("a node that is silent for this long is ended and replaced")] = 15.0
    step_s: Annotated[
        Seconds, about("an engine step that takes longer than this is stuck: its node is ended and replaced")
    ] = 120.0
    restart_backoff_s: Annotated[Seconds, fixed("before a node is started again; doubles up to 15 s")] = 0.5
    restart_backoff_max_s: Annotated[
        Seconds,
        fixed("the longest wait before a node is started again; a node that ends at once costs a start in 15 s"),
    ] = 15.0
    stop_s: Annotated[
        Seconds, fixed("for a process to end after it was told to; `timeouts.nodes.drain_s` is for its requests")
    ] = 10.0
    machines_s: Annotated[Seconds, about("at start, for the machines that the first nodes need")] = 900.0
    nodes: NodeTimeouts = NodeTimeouts()


class ControllerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tandem apply` replaces a running controller by one with another environment."""

    env: Annotated[
        dict[str, str],
        about(
            "environment variables of the controller's process, such as `{PYTHONPATH: /shared/tandem-0.2.0}`; no secrets: Ray shows them"
        ),
    ] = {}
    admin_folders: Annotated[
        list[str],
        about(
            "folders in which models, adapters and files may lie that an operator names over HTTP; what lies elsewhere is named on a "
            "machine of the cluster"
        ),
    ] = []
    admin_may_run_code: Annotated[
        bool,
        about(
            "**an operator's HTTP key then equals a shell on every machine**: it may set environments, modules and any path "
            "([security](security.md#keys-of-clients))"
        ),
    ] = False
    start_s: Annotated[
        Seconds,
        fixed("seconds for a controller with another environment to serve: it imports and asks, and loads no model"),
    ] = 120.0


class TandemConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model: NAME` is short for `model.path: NAME`."""

    model: ModelConfig = ModelConfig(path=DEFAULT_MODEL)
    pools: PoolsConfig = PoolsConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    router: RouterConfig = RouterConfig(tokenizer_path=DEFAULT_MODEL, model_name=DEFAULT_MODEL)
    transfer: TransferConfig = TransferConfig()
    logs: LogsConfig = LogsConfig()
    slo: SloConfig = SloConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    rollout: RolloutConfig = RolloutConfig()
    answers: AnswersConfig = AnswersConfig()
    timeouts: ClusterTimeouts = ClusterTimeouts()
    controller: ControllerConfig = ControllerConfig()
    debug: Annotated[bool, about("every engine audits its invariants whenever it is idle")] = False
    name: Annotated[
        Annotated[str, Meta(pattern="^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?" + END)],
        about(
            "name of this deployment among those on one Ray cluster: small letters, digits and `-`. Commands find it by "
            "`--name`"
        ),
    ] = DEFAULT_NAME

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(model=self.model, cache=self.cache, scheduler=self.scheduler, debug=self.debug)

    def engine_of(self, role: Role) -> EngineConfig:
        """Returns the engine's configuration with the pool's overrides. Raises ConfigurationError if they contradict each other."""
        pool = self.pools.of(role)
        args = {**self.model.engine_args, **pool.engine_args}
        return msgspec.structs.replace(
            self.engine,
            model=msgspec.structs.replace(self.model, engine_args=args),
            cache=_with(self.cache, pool.cache),
            scheduler=_with(self.scheduler, pool.scheduler),
        )


_Section = TypeVar("_Section", CacheConfig, SchedulerConfig)


def _with(section: _Section, values: dict[str, Any]) -> _Section:
    return msgspec.convert({**msgspec.to_builtins(section), **values}, type(section)) if values else section


# The setting that a plain value sets where a section stands.
SHORTHANDS: dict[type[msgspec.Struct], str] = {ModelConfig: "path", PoolConfig: "nodes"}

# What files of earlier versions may set, and what does it now.
GONE: dict[tuple[str, ...], str] = {
    ("router", "tracing", "otlp_headers"): "set OTEL_EXPORTER_OTLP_HEADERS in the environment",
    ("router", "tracing", "service_name"): "set OTEL_SERVICE_NAME in the environment",
}


def _not_of(role: Role) -> Iterator[tuple[tuple[str, ...], str]]:
    """What a pool of this role has not, because of what its nodes do."""
    traits, pool = TRAITS[role], ("pools", role.value)
    if not role.hands_over:
        yield (*pool, "transfer_options"), f"nodes that {traits.task} transfer nothing"
    if not traits.reads_prompts:
        yield (*pool, "context_parallel"), "its nodes read short prompts alone: set pools.prefill.context_parallel"
    if traits.one_rank:
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "machines"):
            yield (*pool, name), f"{traits.one_rank}: set pools.{role.value}.nodes to more"
    if not traits.is_scaled:
        for name in ("min", "max"):
            yield (*pool, name), f"this pool is not scaled by its load: set pools.{role.value}.nodes"
    if not role.runs_requests:
        yield (*pool, "cache"), "its nodes have no KV cache, and cache.encoder_tokens is of all nodes"
        yield (*pool, "scheduler"), "its nodes have no scheduler"
        yield (*pool, "engine_args"), "its nodes have no engine"


# Settings that follow from others and cannot be set, with what to set instead.
DERIVED: dict[tuple[str, ...], str] = {
    ("router", "tokenizer_path"): "it follows from model.path",
    ("router", "model_name"): "set model.served_name instead",
    ("router", "log_level"): "set logs.level instead",
    ("router", "log_format"): "set logs.format instead",
    ("router", "by_priority"): "set scheduler.policy instead",
    ("router", "slo_ttft_s"): "set slo.ttft_s instead",
    ("router", "slo_inter_token_s"): "set slo.inter_token_s instead",
    ("router", "inbox_host"): "it is the address of the router's machine",
    ("model", "threads"): "set pools.POOL.threads instead",
    **{path: why for role in TRAITS for path, why in _not_of(role)},
}
