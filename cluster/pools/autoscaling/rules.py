"""When a pool grows or shrinks by itself. Pure: measurements go in, at most one decision comes out.

A pool grows when it keeps missing a target of the operator's: prompts wait too long before they are computed, requests wait too long for
room in nodes or routers, tokens come too slowly, or blocks run out. It grows as far as it misses the target, and doubles at most. It shrinks,
by half at most, when fewer nodes would have had room to spare all the time.

It does not swing under a steady load, because it remembers with which load a size was too small, and does not return to that size before
the load is clearly lower. So each size can prove too small only once. When tokens came too slowly, that load is the tokens generated per
second, which does not depend on the number of nodes. Their busy time would: a step for half as many requests takes less than half as long,
so two nodes can look idle under a load that was too much for one.

A quiet stretch is no sign that the load is gone, so it counts how loaded the pool was at most in `LONG` times `shrink_after_s`. While that is
not known, a pool shrinks only when it is nearly idle: it was begun with more nodes than the load needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tandem.cluster.config import AutoscalingConfig, SloConfig
from tandem.wire.nodes import Role

# The share of the target for TTFT that a request may wait; the rest is for computing and sending
QUEUE_SHARE = 0.5
BLOCKS_LIMIT = 0.9  # with a larger share of blocks taken, requests begin to be preempted
ROOM_TO_SPARE = 0.7  # a pool may shrink if the smaller one would have had at most this load
NEARLY_IDLE = 0.12  # the same while the load is not known for `LONG` yet
LONG = 10.0  # times `autoscaling.shrink_after_s`: for so long the load is remembered
CLEARLY_LOWER = 0.8  # times the load that was too much for a smaller pool
MOST_AT_ONCE = 2.0  # times its size: so far a pool grows, and so far it shrinks, in one decision
MOST_OF = 0.8  # this share of the looks at a pool must find it too small before it grows


class PoolLoad(msgspec.Struct, frozen=True):
    """The load of one pool at one moment, measured over its nodes that answer."""

    at: float
    nodes: int
    reads_prompts: bool
    writes_tokens: bool
    queue_s: float = 0.0  # how long the pool needs to compute all waiting prompts
    busy: float = 0.0  # the share of time that its engines computed
    blocks: float = 0.0  # the share of blocks that are taken
    # How long requests wait for room, in routers (the longest) or in the nodes' lines (the mean). 0 for pools that do not decode.
    wait_s: float = 0.0
    step_s: float = 0.0  # the duration of an engine's step, which is the time between two tokens of a request
    answering_s: float = 0.0  # of a step that computes no prompt
    fixed_s: float = 0.0  # as much of such a step is as long for any number of requests, as the nodes have learnt
    written_per_s: float = 0.0  # output tokens of the whole pool


class PoolBounds(msgspec.Struct, frozen=True):
    role: Role
    wanted: int
    min_nodes: int
    max_nodes: int
    is_settled: bool  # none of its nodes is starting or leaving
    is_waiting: bool  # for a machine with room


class Breach(msgspec.Struct, frozen=True):
    """With this many nodes the pool could not carry this demand. Demand is load in units of nodes."""

    nodes: int
    demand: float
    written_per_s: float = 0.0  # output tokens of the pool, if tokens came too slowly; else 0


@dataclass(frozen=True, slots=True)
class Resize:
    role: Role
    size: int
    why: str
    breach: Breach | None  # for the caller to remember


def decide(
    now: float,
    changed_at: Mapping[Role, float],
    history: Mapping[Role, Sequence[PoolLoad]],
    pools: Sequence[PoolBounds],
    breaches: Mapping[Role, Sequence[Breach]],
    slo: SloConfig,
    config: AutoscalingConfig,
) -> Resize | None:
    """Returns the most urgent change, or None. `changed_at` is when each pool last changed: no measurement until `settle_s` after that lets it
    grow, because it describes another pool."""
    if not all(pool.is_settled for pool in pools):
        return None
    known = {pool.role: _since(history.get(pool.role, ()), now - LONG * config.shrink_after_s) for pool in pools}
    growths = []
    for pool in pools:
        fresh = _since(known[pool.role], changed_at[pool.role] + config.settle_s)
        if (growth := _growth(now, pool, fresh, slo, config)) is not None:
            growths.append(growth)
    if growths:
        return max(growths, key=lambda growth: growth[0])[1]
    for pool in pools:
        if now - changed_at[pool.role] >= config.shrink_after_s:
            shrinking = _shrinking(now, pool, known[pool.role], breaches.get(pool.role, ()), slo, config)
            if shrinking is not None:
                return shrinking
    return None


def at_its_limit(
    now: float,
    changed_at: float,
    history: Mapping[Role, Sequence[PoolLoad]],
    pool: PoolBounds,
    slo: SloConfig,
    config: AutoscalingConfig,
) -> str | None:
    """Returns what the pool breaks although it is at its maximum; None if it breaks nothing or may grow."""
    loads = _since(history.get(pool.role, ()), changed_at + config.settle_s)
    if pool.wanted < pool.max_nodes or not _breaking(now, loads, slo, config):
        return None
    name = pool.role.value
    return f"{name}: {pool.wanted} are too few, and pools.{name}.max allows no more: {_why(loads[-1], slo)}"


def _breaking(now: float, loads: Sequence[PoolLoad], slo: SloConfig, config: AutoscalingConfig) -> Sequence[PoolLoad]:
    """Returns the recent looks if most of them found a target missed; else []."""
    recent = _last(loads, now, config.grow_after_s, config.period_s)
    return recent if sum(_pressure(load, slo) > 1 for load in recent) >= MOST_OF * len(recent) else []


def _growth(
    now: float, pool: PoolBounds, loads: Sequence[PoolLoad], slo: SloConfig, config: AutoscalingConfig
) -> tuple[float, Resize] | None:
    """Returns the growth and how urgent it is."""
    recent = _breaking(now, loads, slo, config)
    if not recent or pool.is_waiting or pool.wanted >= pool.max_nodes:
        return None
    pressure = _pressure(recent[-1], slo)  # of now: a line that has become longer goes on
    size = min(pool.max_nodes, max(pool.wanted + 1, math.ceil(pool.wanted * min(pressure, MOST_AT_ONCE))))
    slow = [load.written_per_s for load in recent if load.writes_tokens and load.step_s > slo.inter_token_s]
    breach = Breach(
        pool.wanted,
        math.fsum(_demand(load, slo) for load in recent) / len(recent),
        math.fsum(slow) / len(slow) if slow else 0.0,
    )
    why = f"{pool.role.value}: from {pool.wanted} to {size}: {_why(recent[-1], slo)}"
    return pressure, Resize(pool.role, size, why, breach)


def _shrinking(
    now: float,
    pool: PoolBounds,
    loads: Sequence[PoolLoad],
    breaches: Sequence[Breach],
    slo: SloConfig,
    config: AutoscalingConfig,
) -> Resize | None:
    """Returns the smallest size, but at least half of the pool, that would have had room to spare for all that is known."""
    known_s = now - loads[0].at if loads else 0.0
    least = max(math.ceil(pool.wanted / MOST_AT_ONCE), pool.min_nodes, 1)
    if known_s < config.shrink_after_s - config.period_s or least >= pool.wanted:
        return None
    room = ROOM_TO_SPARE if known_s >= LONG * config.shrink_after_s - 2 * config.period_s else NEARLY_IDLE
    if _demand(loads[-1], slo) > room * pool.wanted:
        return None  # without a look at all others
    # The highest mean over `grow_after_s` counts: a stretch of that length makes a pool grow.
    if _highest_mean([max(_queue_pressure(load, slo), _wait_pressure(load, slo)) for load in loads], config) > 1:
        return None
    demand = _highest_mean([_demand(load, slo) for load in loads], config)
    written = _highest_mean([load.written_per_s for load in loads], config)
    size = max(math.ceil(demand / room), least)
    for breach in breaches:
        slow = breach.written_per_s and written > CLEARLY_LOWER * breach.written_per_s
        if slow or demand > CLEARLY_LOWER * breach.demand:
            size = max(size, breach.nodes + 1)
    if size >= pool.wanted:
        return None
    why = (
        f"{pool.role.value}: from {pool.wanted} to {size}: in {known_s:.0f} s "
        f"{size} would have been {demand / size:.0%} loaded at most"
    )
    return Resize(pool.role, size, why, None)


def _since(loads: Sequence[PoolLoad], at: float) -> Sequence[PoolLoad]:
    return [load for load in loads if load.at >= at]


def _last(loads: Sequence[PoolLoad], now: float, seconds: float, period_s: float) -> Sequence[PoolLoad]:
    """Returns the looks of the last `seconds`; [] if the measurements do not reach back that far."""
    recent = [load for load in loads if load.at > now - seconds - period_s / 2]
    return recent if recent and recent[0].at <= now - seconds + period_s else []


def _pressure(load: PoolLoad, slo: SloConfig) -> float:
    """Returns the load as a multiple of its limit, for the measure that is nearest to its own."""
    pressure = load.blocks / BLOCKS_LIMIT
    if load.reads_prompts:
        pressure = max(pressure, _queue_pressure(load, slo))
    if load.writes_tokens:
        pressure = max(pressure, load.step_s / slo.inter_token_s, _wait_pressure(load, slo))
    return pressure


def _wait_pressure(load: PoolLoad, slo: SloConfig) -> float:
    return load.wait_s / (QUEUE_SHARE * slo.ttft_s) if load.writes_tokens else 0.0


def _queue_pressure(load: PoolLoad, slo: SloConfig) -> float:
    return load.queue_s / (QUEUE_SHARE * slo.ttft_s) if load.reads_prompts else 0.0


def _why(load: PoolLoad, slo: SloConfig) -> str:
    pressure = _pressure(load, slo)
    if pressure == _queue_pressure(load, slo):
        limit = QUEUE_SHARE * slo.ttft_s
        return f"prompts wait {load.queue_s:.1f} s, more than {limit:.1f} s ({QUEUE_SHARE:.0%} of slo.ttft_s)"
    if pressure == _wait_pressure(load, slo):
        limit = QUEUE_SHARE * slo.ttft_s
        return f"requests wait {load.wait_s:.1f} s for room, more than {limit:.1f} s ({QUEUE_SHARE:.0%} of slo.ttft_s)"
    if pressure == load.blocks / BLOCKS_LIMIT:
        return f"{load.blocks:.0%} of its blocks are taken, more than {BLOCKS_LIMIT:.0%}"
    return f"a token takes {1000 * load.step_s:.0f} ms, more than slo.inter_token_s ({1000 * slo.inter_token_s:.0f} ms)"


def _highest_mean(demands: Sequence[float], config: AutoscalingConfig) -> float:
    length = min(len(demands), max(1, round(config.grow_after_s / config.period_s)))
    sums = [0.0, *itertools.accumulate(demands)]
    return max(end - start for start, end in zip(sums, sums[length:], strict=False)) / length


def _demand(load: PoolLoad, slo: SloConfig) -> float:
    """Returns the load in units of nodes. With fewer nodes it grows no faster than each node's share: busy time, blocks, and what a step
    takes for its requests are divided among the nodes."""
    shares = [load.blocks / BLOCKS_LIMIT]
    if load.reads_prompts and not load.writes_tokens:
        # Not for decode nodes: they compute all the time, for one request or for fifty
        shares.append(load.busy)
    if load.writes_tokens:
        # A decode node that has nothing to do reads prompts, which a smaller pool would not.
        step_s = load.step_s if load.reads_prompts else load.answering_s or load.step_s
        fixed_s = min(load.fixed_s, step_s, slo.inter_token_s / 2)
        share = (step_s - fixed_s) / (slo.inter_token_s - fixed_s)
        # With fewer nodes each has more requests, and these stay longer: what they add to the steps of a second remains the same.
        shares.append(share * load.busy * slo.inter_token_s / step_s if fixed_s else share)
    return load.nodes * max(shares)
