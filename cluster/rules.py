"""What no single type can say: ranges, and settings that only make sense together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tandem.cluster.config import (
    LONGEST_S,
    MOST_NODES,
    AutoscalingConfig,
    ClusterTimeouts,
    PoolConfig,
    SloConfig,
    TandemConfig,
)
from tandem.cluster.setting_names import Path
from tandem.kvtransfer.protocol.settings import MAX_LEASE_S
from tandem.node.config import NodeTimeouts
from tandem.wire.nodes import Role

Broken = tuple[Path, str]
"""Which setting, and what it must be instead: together a sentence."""

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DIRECTIONS = ("push", "pull")


def broken_rules(config: TandemConfig) -> Iterator[Broken]:
    yield from _ranges(config)
    yield from _pools(config)
    yield from _together(config)


def _get(config: TandemConfig, path: Path) -> Any:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value


def _at_least(minimum: float) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value is None or value >= minimum), f"must be at least {minimum}"


def _between(minimum: int, maximum: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: value is None or minimum <= value <= maximum
    ), f"must be from {minimum} to {maximum}"


def _one_of(choices: tuple[str, ...]) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in choices), f"must be one of {', '.join(choices)}"


_SECONDS: tuple[Callable[[Any], bool], str] = (
    (lambda value: 0 < value <= LONGEST_S),
    f"must be above 0 and at most {LONGEST_S:.0f}",
)
_NOT_EMPTY: tuple[Callable[[Any], bool], str] = ((lambda value: bool(value.strip())), "must not be empty")

_AMOUNTS: tuple[Callable[[Any], bool], str] = (
    (lambda value: all(amount > 0 for amount in value.values())),
    "must be amounts above 0, such as {GPU: 1}",
)


def _timeouts(section: type[msgspec.Struct], prefix: Path) -> dict[Path, tuple[Callable[[Any], bool], str]]:
    return {(*prefix, name): _SECONDS for name in section.__struct_fields__ if name.endswith("_s")}


_RANGES: dict[Path, tuple[Callable[[Any], bool], str]] = {
    ("model", "path"): _NOT_EMPTY,
    ("model", "dtype"): _one_of(_DTYPES),
    ("model", "device"): _NOT_EMPTY,
    ("model", "threads"): _at_least(0),
    **{("pools", role.value, "nodes"): _between(0, MOST_NODES) for role in Role},
    **{("pools", role.value, "threads"): _at_least(1) for role in Role},
    **{("pools", role.value, "min"): _between(0, MOST_NODES) for role in Role},
    **{("pools", role.value, "max"): _between(1, MOST_NODES) for role in Role},
    **{("pools", role.value, "resources"): _AMOUNTS for role in Role},
    ("pools", "nodes_per_core"): _at_least(1),
    ("cache", "memory_bytes"): _at_least(1 << 20),
    ("scheduler", "max_model_len"): _at_least(1),
    ("scheduler", "long_prefill_token_threshold"): _at_least(0),
    ("scheduler", "num_speculative_tokens"): _at_least(0),
    ("scheduler", "max_loras"): _at_least(1),
    ("router", "host"): _NOT_EMPTY,
    ("transfer", "connector"): _NOT_EMPTY,
    ("transfer", "direction"): _one_of(_DIRECTIONS),
    ("transfer", "lease_s"): (
        (lambda value: 0 < value <= MAX_LEASE_S),
        f"must be above 0 and at most {MAX_LEASE_S:g}",
    ),
    ("transfer", "timeout_s"): _SECONDS,
    ("transfer", "handshake_timeout_s"): _SECONDS,
    **_timeouts(SloConfig, ("slo",)),
    **_timeouts(AutoscalingConfig, ("autoscaling",)),
    **_timeouts(ClusterTimeouts, ("timeouts",)),
    **_timeouts(NodeTimeouts, ("timeouts", "nodes")),
}


def _ranges(config: TandemConfig) -> Iterator[Broken]:
    for path, (holds, sentence) in _RANGES.items():
        value = _get(config, path)
        if not holds(value):
            yield path, f"{sentence}, not {value!r}"


def _pools(config: TandemConfig) -> Iterator[Broken]:
    counts = {role: config.pools.of(role).first_size for role in Role}
    if min(counts.values()) < 0:
        return
    prefill, decode, aggregated = counts[Role.PREFILL], counts[Role.DECODE], counts[Role.AGGREGATED]
    if aggregated and (prefill or decode):
        yield (
            ("pools", "aggregated", "nodes"),
            f"is {aggregated}, but pools.prefill is {prefill} and pools.decode is {decode}: "
            "choose one layout and set the other's counts to 0",
        )
    elif not any(counts.values()):
        yield (
            ("pools", "prefill", "nodes"),
            "and every other pool is 0: nobody would answer; set prefill and decode to at least 1 each, or aggregated",
        )
    elif prefill and not decode:
        yield ("pools", "decode", "nodes"), f"is 0, but pools.prefill is {prefill}: set it to at least 1"
    elif decode and not prefill:
        yield (
            ("pools", "prefill", "nodes"),
            f"is 0, but pools.decode is {decode}: set it to at least 1, or use pools.aggregated",
        )
    for role in Role:
        yield from _limits(role, config.pools.of(role))


def _limits(role: Role, pool: PoolConfig) -> Iterator[Broken]:
    section = ("pools", role.value)
    if pool.max is not None and pool.min > pool.max:
        yield (*section, "min"), f"is {pool.min}, which is more than pools.{role.value}.max ({pool.max})"
    elif pool.nodes is None and pool.max is not None:
        yield (
            (*section, "max"),
            f"is {pool.max}, but pools.{role.value}.nodes is null: a pool follows the machines or its load, not both",
        )
    # Said of the limit: it was given, the number of nodes may be a default.
    elif pool.nodes and pool.nodes < pool.min:
        yield (*section, "min"), f"is {pool.min}, which is more than pools.{role.value}.nodes ({pool.nodes})"
    elif pool.nodes and pool.max is not None and pool.nodes > pool.max:
        yield (*section, "max"), f"is {pool.max}, which is less than pools.{role.value}.nodes ({pool.nodes})"


def _together(config: TandemConfig) -> Iterator[Broken]:
    timeouts, scheduler, scaling = config.timeouts, config.scheduler, config.autoscaling
    for name in ("grow_after_s", "shrink_after_s"):
        if getattr(scaling, name) >= scaling.period_s:
            continue
        if scaling.period_s == AutoscalingConfig().period_s:
            yield ("autoscaling", name), f"must be at least autoscaling.period_s ({scaling.period_s})"
        else:
            yield (
                ("autoscaling", "period_s"),
                f"must be at most autoscaling.{name} ({getattr(scaling, name)})",
            )
    if timeouts.unresponsive_s < timeouts.silence_s:
        yield (
            ("timeouts", "unresponsive_s"),
            f"must be at least timeouts.silence_s ({timeouts.silence_s}), not {timeouts.unresponsive_s}",
        )
    if not scheduler.chunked_prefill and (scheduler.max_model_len or 0) > scheduler.max_num_batched_tokens:
        yield (
            ("scheduler", "max_model_len"),
            f"is {scheduler.max_model_len}, but without chunked prefill no prompt longer than "
            f"scheduler.max_num_batched_tokens ({scheduler.max_num_batched_tokens}) can run: raise that, or allow chunks",
        )
