"""Rules between settings of several structs. The rules of a single field are in its type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Protocol, cast

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wings, is_there
from tandem.cluster.config import MOST_RANKS, OF_ALL_POOLS, PoolConfig, TandemConfig
from tandem.cluster.describe import counted
from tandem.cluster.labels import wrong_in
from tandem.cluster.roles import TRAITS
from tandem.cluster.settings.names import Path
from tandem.engine.config import OWN_ENGINE, EngineConfig
from tandem.engine.wings import EngineWing, other_engines
from tandem.node.config import refused_with_ranks
from tandem.wire.adapters import MOST_ADAPTERS, check_name
from tandem.wire.nodes import ENGINE_ROLES, Role

Broken = tuple[Path, str]
"""The setting, and the end of a sentence about it: what is wrong, and what would be right."""

# Settings that a wing reads, and nothing else: where it was deleted, they would be ignored.
OF_WINGS: Mapping[Path, str] = {
    ("cache", "events", "endpoint"): "tandem.node.kv_events",
    ("model", "exact"): "tandem.engine.model.exact",
    ("model", "hidden_states_folder"): "tandem.engine.model.hidden_states",
    **{("pools", role.value, "max"): "tandem.cluster.pools.autoscaling" for role in ENGINE_ROLES},
    **{
        ("pools", role.value, "context_parallel"): "tandem.engine.model.divided"
        for role in ENGINE_ROLES
        if TRAITS[role].reads_prompts
    },
    ("router", "batches_folder"): "tandem.router.batches",
    ("router", "other_models"): "tandem.router.other_models",
    ("router", "processes"): "tandem.router.processes",
    ("router", "receipt_key_file"): "tandem.router.receipts",
    ("router", "tracing", "sample"): "tandem.router.tracing",
    ("router", "tracing", "otlp_endpoint"): "tandem.router.tracing",
    ("scheduler", "trace_folder"): "tandem.node.step_trace",
}

# Wings that refuse further settings of a node.
RULES_OF_WINGS = ("tandem.engine.model.exact.settings",)


class RulesWing(Protocol):
    """What such a module has. Its imports are light."""

    def refusals(self, engine: EngineConfig, ranks: int) -> Iterator[tuple[str, str]]:
        """Yields each setting that is refused for nodes with so many ranks, such as `cache.dtype`, and the end of a sentence about it."""

    def check_type(self, engine: EngineConfig, model_type: str | None) -> None:
        """Raises ConfigurationError if a model of this type is refused; None: the type is not known yet."""


def wings_with_rules() -> list[RulesWing]:
    return [cast("RulesWing", module) for module in find_wings(RULES_OF_WINGS)]


def broken_rules(config: TandemConfig) -> Iterator[Broken]:
    if not config.model.path.strip():
        yield ("model", "path"), f"must not be empty, not {config.model.path!r}"
    guessing = (config.scheduler.num_speculative_tokens, *_guesses_of_pools(config))
    if config.model.draft and not any(guessing):
        yield (("model", "draft"), "needs scheduler.num_speculative_tokens: how many tokens it guesses, such as 4")
    yield from broken_adapters(config)
    wrong = list(_sections_of_pools(config))
    if wrong:
        yield from wrong  # the rules below need valid sections
        return
    yield from _without_wings(config)
    yield from _pools(config)
    yield from _engine(config)
    yield from _of_wings(config)
    yield from _environment(("router", "env"), config.router.env)
    yield from _environment(("controller", "env"), config.controller.env)
    for folder in config.controller.admin_folders:
        if not folder.startswith("/"):
            yield ("controller", "admin_folders"), f"has {folder[:80]!r}, which is no whole path, such as /models"
    yield from _together(config)


def _without_wings(config: TandemConfig) -> Iterator[Broken]:
    for path, wing in OF_WINGS.items():
        section, name = path[0], path[-1]
        asking = [path] if reduce(getattr, path, config) != reduce(getattr, path, TandemConfig()) else []
        for role in Role:
            if name in getattr(config.pools.of(role), section, {}):
                asking.append(("pools", role.value, section))
        if asking and not is_there(wing):
            folder = wing.removeprefix("tandem.").replace(".", "/")
            for setting in asking:
                what = "" if setting == path else f"has {name}, which "
                yield setting, f"{what}needs {folder}/, which this installation does not have: leave it out"


def _guesses_of_pools(config: TandemConfig) -> Iterator[object]:
    for role in Role:
        yield config.pools.of(role).scheduler.get("num_speculative_tokens")


def _sections_of_pools(config: TandemConfig) -> Iterator[Broken]:
    for role in Role:
        pool = config.pools.of(role)
        for section in OF_ALL_POOLS:
            if not getattr(pool, section):
                continue
            try:
                config.engine_of(role)
            except (ConfigurationError, msgspec.ValidationError) as error:
                yield ("pools", role.value, section), f"does not fit: {error}"
                break


def broken_adapters(config: TandemConfig) -> Iterator[Broken]:
    path, adapters = ("model", "adapters"), config.model.adapters
    if adapters and not config.scheduler.max_loras:
        yield path, "needs scheduler.max_loras: how many different ones a step may have, such as 4"
    if len(adapters) > MOST_ADAPTERS:
        yield path, f"has {len(adapters)} adapters, and {MOST_ADAPTERS} are the most that a cluster has"
    for name, where in adapters.items():
        try:
            check_name(name)
        except ConfigurationError as error:
            yield path, f"is wrong: {error}"
        if not where.strip():
            yield path, f"must say where {name!r} is: a folder, or owner/name on the Hugging Face hub"
        if name in (config.model.served_name, *config.router.model_aliases):
            yield path, f"has {name!r}, which is the model's own name: call the adapter something else"


def _pools(config: TandemConfig) -> Iterator[Broken]:
    counts = {role: config.pools.of(role).first_size for role in Role}
    prefill, decode, aggregated = counts[Role.PREFILL], counts[Role.DECODE], counts[Role.AGGREGATED]
    if aggregated and (prefill or decode):
        yield (
            ("pools", "aggregated", "nodes"),
            f"is {aggregated}, but pools.prefill is {prefill} and pools.decode is {decode}: "
            "choose one layout and set the other's counts to 0",
        )
    elif not (prefill or decode or aggregated):
        yield (
            ("pools", "prefill", "nodes"),
            "and every other pool that answers is 0: no node would answer; set prefill and decode to at least 1 each, or aggregated",
        )
    elif prefill and not decode:
        yield ("pools", "decode", "nodes"), f"is 0, but pools.prefill is {prefill}: set it to at least 1"
    elif decode and not prefill:
        yield (
            ("pools", "prefill", "nodes"),
            f"is 0, but pools.decode is {decode}: set it to at least 1, or use pools.aggregated",
        )
    if config.rollout.surge == 0:
        yield from _replacements(config)
    for role in Role:
        yield from _limits(role, config.pools.of(role))
        yield from _ranks(role, config)
        pool = config.pools.of(role)
        yield from _environment(("pools", role.value, "env"), pool.env)
        for name in pool.env.keys() & _SET_OTHERWISE.keys():
            otherwise = _SET_OTHERWISE[name].format(pool=role.value)
            yield ("pools", role.value, "env"), f"has {name}, which Tandem sets: {otherwise}"
        for wrong in wrong_in(pool.label_selector):
            yield ("pools", role.value, "label_selector"), wrong


def _engine(config: TandemConfig) -> Iterator[Broken]:
    model, engines = config.model, other_engines()
    if model.engine == OWN_ENGINE:
        settings: dict[Path, object] = {
            ("model", "engine_args"): model.engine_args,
            ("model", "engine_python"): model.engine_python,
            **{("pools", role.value, "engine_args"): config.pools.of(role).engine_args for role in Role},
        }
        for path, value in settings.items():
            if value:
                yield (path, f"is of another engine, and model.engine is {OWN_ENGINE}: set that, such as to vllm")
        return
    if model.engine not in engines:
        yield ("model", "engine"), f"must be one of {', '.join((OWN_ENGINE, *engines))}, not {model.engine!r}"
        return
    other = engines[model.engine]
    if not model.engine_python:
        yield (
            ("model", "engine_python"),
            f"is empty, and model.engine is {model.engine}: name the Python of the environment that has it, such as /opt/vllm/bin/python",
        )
    elif not model.engine_python.startswith("/"):
        yield (
            ("model", "engine_python"),
            f"must be a whole path such as /opt/vllm/bin/python, not {model.engine_python!r}",
        )
    serving = [role for role in Role if config.pools.of(role).last_size]
    told: set[Broken] = set()
    for role in serving:
        pool, engine = config.pools.of(role), config.engine_of(role)
        for args, of_args in (
            (model.engine_args, ("model", "engine_args")),
            (pool.engine_args, ("pools", role.value, "engine_args")),
        ):
            asked = msgspec.structs.replace(engine, model=msgspec.structs.replace(model, engine_args=args))
            for name, why in other.refusals(asked):
                told.add((of_args if name == "model.engine_args" else tuple(name.split(".")), why))
        yield from _pool_of_engine(other, role, pool)
    yield from sorted(told)


def _of_wings(config: TandemConfig) -> Iterator[Broken]:
    if config.model.engine != OWN_ENGINE:  # it has refusals of its own
        return
    told: set[Broken] = set()
    for role in ENGINE_ROLES:
        pool = config.pools.of(role)
        for wing in wings_with_rules() if pool.last_size else ():
            engine = config.engine_of(role)
            told |= {(tuple(name.split(".")), why) for name, why in wing.refusals(engine, pool.ranks)}
    yield from sorted(told)


def _pool_of_engine(other: EngineWing, role: Role, pool: PoolConfig) -> Iterator[Broken]:
    if not role.runs_requests:
        yield (
            ("pools", role.value, "nodes"),
            f"is {pool.first_size}, and {other.NAME} takes no rows from encoder nodes: set it to 0",
        )
    elif pool.ranks > 1:
        yield (
            ("pools", role.value, "tensor_parallel"),
            f"and pipeline_parallel and context_parallel are of Tandem's own engine: set model.engine_args to what {other.NAME} calls them",
        )


def _replacements(config: TandemConfig) -> Iterator[Broken]:
    """Without a node more than a pool's size, an old one must go before a new one is there."""
    setting, unavailable = ("rollout", "surge"), config.rollout.max_unavailable
    if unavailable == 0:
        yield (
            setting,
            "is 0, and rollout.max_unavailable, too: no node could be replaced; set one of them to at least 1",
        )
    for role in Role:
        if unavailable is None and role.writes_answers and config.pools.of(role).last_size == 1:
            yield (
                setting,
                f"is 0, but the only {role.value} node serves until another one does: set it to at least 1, or "
                "rollout.max_unavailable to 1, which serves nothing meanwhile",
            )


# Variables that Tandem or Ray sets in a node's process, and the settings for them.
_SET_OTHERWISE = {
    "OMP_NUM_THREADS": "set pools.{pool}.threads",
    "CUDA_VISIBLE_DEVICES": "Ray chooses GPUs by pools.{pool}.resources: {{GPU: 1}}",
}
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|CREDENTIALS|(^|_)KEY)$", re.IGNORECASE)


def _environment(setting: Path, env: Mapping[str, str]) -> Iterator[Broken]:
    for name in env:
        if not _VARIABLE.fullmatch(name):
            yield (
                setting,
                f"has {name[:80]!r}, which is not a name for an environment variable: use letters, digits and '_'",
            )
        elif name.startswith("RAY_"):
            yield (setting, f"has {name}, which Ray reads when it starts: set it in the environment of `ray start`")
        elif _SECRET.search(name):
            yield (
                setting,
                f"has {name}, but Ray shows a process's environment to everyone who reads its state: set it in the environment of `ray start`",
            )


def _ranks(role: Role, config: TandemConfig) -> Iterator[Broken]:
    pool = config.pools.of(role)
    yield from _machines(role, config)
    if pool.ranks == 1:
        return
    widths = ("pipeline_parallel", "context_parallel")
    name = next((each for each in widths if getattr(pool, each) > 1), "tensor_parallel")
    setting, size = ("pools", role.value, name), getattr(pool, name)
    serving = [config.pools.of(other) for other in Role if config.pools.of(other).last_size]
    if not pool.last_size and all(other.ranks == 1 for other in serving):
        yield setting, f"is {size}, but pools.{role.value}.nodes is 0: set it to at least 1"
    if pool.ranks > MOST_RANKS:
        yield (
            setting,
            f"is {size}, and tensor_parallel {pool.tensor_parallel}: a node would have {pool.ranks} ranks, but at most {MOST_RANKS} are possible",
        )
    on_gpus = config.model.device.startswith("cuda")
    if role.hands_over and (on_gpus or pool.machines > 1) and config.transfer.connector != "nixl":
        where = "on a GPU of its own" if on_gpus else "on its own machine"
        yield (
            setting,
            f"is {size}, and each rank keeps its KV {where}, which transfer.connector {config.transfer.connector} does not "
            "transfer: set transfer.connector to nixl",
        )
    if role.hands_over and on_gpus and config.transfer.options.get("staging") == "host":
        yield (
            setting,
            f"is {size}, and each rank keeps its KV on a GPU of its own, but transfer.options.staging is host, which copies from one "
            "GPU only: set it to none",
        )
    gpus = pool.resources.get("GPU", 0)
    if 0 < gpus < pool.ranks and config.model.device != "cpu":
        yield (
            ("pools", role.value, "resources"),
            f"has {{GPU: {gpus:g}}}, but a node's {pool.ranks} ranks need a GPU each: set {{GPU: {pool.ranks}}}",
        )
    for reason in refused_with_ranks(config.engine, pool.pipeline_parallel, pool.context_parallel):
        yield setting, f"is {size}, but {reason}"


def _machines(role: Role, config: TandemConfig) -> Iterator[Broken]:
    pool, setting = config.pools.of(role), ("pools", role.value, "machines")
    if pool.machines == 1:
        return
    if pool.ranks % pool.machines:
        yield (
            setting,
            f"is {pool.machines}, but a node's {counted(pool.ranks, 'rank')} (tensor_parallel times pipeline_parallel times context_parallel) cannot be divided equally among them: set "
            f"pools.{role.value}.tensor_parallel or pipeline_parallel so that the product is a multiple of it",
        )
    if config.engine_of(role).cache.tiers:
        yield (
            setting,
            f"is {pool.machines}, and each machine keeps the KV of its own ranks, but cache.tiers would copy one rank's only: leave cache.tiers out",
        )
    for name, amount in pool.resources.items():
        if name == "GPU" and amount % pool.machines:
            yield (
                ("pools", role.value, "resources"),
                f"has {{GPU: {amount:g}}}, which cannot be divided equally among {counted(pool.machines, 'machine')}: set "
                f"{{GPU: {pool.ranks}}}",
            )


def _limits(role: Role, pool: PoolConfig) -> Iterator[Broken]:
    section = ("pools", role.value)
    if pool.max is not None and pool.min > pool.max:
        yield (*section, "min"), f"is {pool.min}, which is more than pools.{role.value}.max ({pool.max})"
    elif pool.nodes is None and pool.max is not None:
        yield (
            (*section, "max"),
            f"is {pool.max}, but pools.{role.value}.nodes is null: a pool follows the machines or its load, not both",
        )
    # The message is about the limit, which was set; the number of nodes may be a default.
    elif pool.nodes and pool.nodes < pool.min:
        yield (*section, "min"), f"is {pool.min}, which is more than pools.{role.value}.nodes ({pool.nodes})"
    elif pool.nodes and pool.max is not None and pool.nodes > pool.max:
        yield (*section, "max"), f"is {pool.max}, which is less than pools.{role.value}.nodes ({pool.nodes})"


def _together(config: TandemConfig) -> Iterator[Broken]:
    engines = [config.engine_of(role) for role in Role if config.pools.of(role).last_size]
    for name in ("remote", "mirror"):
        near = [next((tier for tier in engine.cache.tiers if tier.cpu), None) for engine in engines]
        late = [tier.store_threshold for tier in near if tier is not None and tier.store_threshold > 1]
        if getattr(config.cache, name) and None in near:
            yield (
                ("cache", name),
                "needs a tier in host memory, because nodes copy between those: cache.tiers: [{cpu: 8GiB}]",
            )
        elif getattr(config.cache, name) and late:
            yield (
                ("cache", name),
                f"copies a block the first time that it is computed, but cache.tiers stores it only the {late[0]}th "
                "time: leave store_threshold out",
            )
    timeouts, scaling = config.timeouts, config.autoscaling
    if scaling.shrink_after_s < scaling.period_s:
        yield (
            ("autoscaling", "shrink_after_s"),
            f"must be at least {scaling.period_s:g}, the time between two looks at the load",
        )
    if timeouts.unresponsive_s < timeouts.silence_s:
        yield (
            ("timeouts", "unresponsive_s"),
            f"must be at least {timeouts.silence_s:g}, the time that a node's answer may take, not {timeouts.unresponsive_s:g}",
        )
    for engine in engines:
        scheduler = engine.scheduler
        if scheduler.chunked_prefill or (scheduler.max_model_len or 0) <= scheduler.max_num_batched_tokens:
            continue
        yield (
            ("scheduler", "max_model_len"),
            f"is {scheduler.max_model_len}, but without chunked prefill no prompt longer than "
            f"scheduler.max_num_batched_tokens ({scheduler.max_num_batched_tokens}) can run: raise that, or allow chunks",
        )
        return
