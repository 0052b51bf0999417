"""When a pool grows or shrinks by itself. Pure: what was measured goes in, at most one decision comes out.

A pool grows when it keeps breaking what the operator asked for: prompts wait too long before they are read, requests wait too long
for room, in its nodes or in routers before them, tokens come too slowly, or blocks run out. It shrinks when the nodes that would be left had room to spare all the time.

Why it does not swing under a steady load: what breaks with k nodes is remembered with the load that broke it, and the
pool does not go back to k before the load is clearly lower. So every size can prove too small once, and never again. Where
tokens came too slowly that load is how many were written in a second, which more nodes do not change: a step with half as many answers
takes less than half as long, so two nodes look idle that write what one could not.

Under a load that comes in bursts each quiet stretch would look like the end of it. So a pool that has to grow soon after it shrank
has to be quiet for twice as long before it shrinks again (`QuietTimes`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tandem.cluster.config import AutoscalingConfig, SloConfig
from tandem.wire.nodes import Role

QUEUE_SHARE = 0.5  # of the time to the first token may be spent waiting; the rest is for reading and sending
BLOCKS_LIMIT = 0.9  # above it requests begin to push each other out
ROOM_TO_SPARE = 0.7  # a smaller pool may be expected to be this loaded, not more
CLEARLY_LOWER = 0.8  # than the load that broke the smaller pool
MOST_OF = 0.8  # of the looks at a pool must agree that it is too small
SOON = 2.0  # times as long as it was quiet before it shrank
LONG = 4.0  # times as long without growing: bursts have become rare
MOST_TIMES = 16.0  # as long as `autoscaling.shrink_after_s`


class PoolLoad(msgspec.Struct, frozen=True):
    """One pool at one moment, over the nodes of it that answer."""

    at: float
    nodes: int
    reads_prompts: bool
    writes_tokens: bool
    queue_s: float = 0.0  # until what waits would be read, if nothing more came
    busy: float = 0.0  # share of the time that its engines computed
    blocks: float = 0.0  # share of the blocks that are taken
    # How long requests wait for room, in routers (the longest) or in the nodes' lines (on average). Only pools that write tokens have it.
    wait_s: float = 0.0
    step_s: float = 0.0  # one step of an engine: what a running answer waits for its next token
    written_per_s: float = 0.0  # tokens of answers, by the whole pool


class PoolBounds(msgspec.Struct, frozen=True):
    role: Role
    wanted: int
    min_nodes: int
    max_nodes: int
    is_settled: bool  # no node of it is starting or going
    is_waiting: bool  # for machines


class Breach(msgspec.Struct, frozen=True):
    """So many nodes were too few for this demand, which is the load in nodes' worth."""

    nodes: int
    demand: float
    written_per_s: float = 0.0  # where tokens came too slowly


class QuietTimes:
    """How many times as long as `autoscaling.shrink_after_s` a pool must have room to spare before it shrinks. Doubled when a shrinking
    proves to have been too early, halved when none has for long."""

    def __init__(self) -> None:
        self._times: dict[Role, float] = {}
        self._shrank_at: dict[Role, float] = {}
        self._grew_at: dict[Role, float] = {}

    def of(self, role: Role) -> float:
        return self._times.get(role, 1.0)

    def changed(self, role: Role, now: float, *, grew: bool, shrink_after_s: float) -> None:
        times = self.of(role)
        quiet_s = times * shrink_after_s
        if grew:
            if now - self._shrank_at.pop(role, -math.inf) <= SOON * quiet_s:
                self._times[role] = min(2 * times, MOST_TIMES)
            self._grew_at[role] = now
        else:
            if now - self._grew_at.get(role, -math.inf) > LONG * quiet_s:
                self._times[role] = max(times / 2, 1.0)
            self._shrank_at[role] = now


@dataclass(frozen=True, slots=True)
class Resize:
    role: Role
    size: int
    why: str
    breach: Breach | None  # to be remembered


def decide(
    now: float,
    changed_at: float,
    history: Mapping[Role, Sequence[PoolLoad]],
    pools: Sequence[PoolBounds],
    breaches: Mapping[Role, Sequence[Breach]],
    slo: SloConfig,
    config: AutoscalingConfig,
    quiet: QuietTimes | None = None,
) -> Resize | None:
    """`changed_at`: when pools last changed, for whatever reason. What was measured before that is of another pool."""
    if not all(pool.is_settled for pool in pools):
        return None
    since = changed_at + config.settle_s
    fresh = {pool.role: [load for load in history.get(pool.role, ()) if load.at >= since] for pool in pools}
    growths = [
        growth for pool in pools if (growth := _growth(now, pool, fresh[pool.role], slo, config)) is not None
    ]
    if growths:
        return max(growths, key=lambda growth: growth[0])[1]
    for pool in pools:
        quiet_s = config.shrink_after_s * (quiet.of(pool.role) if quiet is not None else 1.0)
        shrinking = _shrinking(now, pool, fresh[pool.role], breaches.get(pool.role, ()), slo, config, quiet_s)
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
    """What a pool breaks that may not grow any more."""
    loads = [load for load in history.get(pool.role, ()) if load.at >= changed_at + config.settle_s]
    if pool.wanted < pool.max_nodes or not _breaking(now, loads, slo, config):
        return None
    name = pool.role.value
    return f"{name}: {pool.wanted} are too few, and pools.{name}.max allows no more: {_why(loads[-1], slo)}"


def _breaking(
    now: float, loads: Sequence[PoolLoad], slo: SloConfig, config: AutoscalingConfig
) -> Sequence[PoolLoad]:
    """The recent looks, when most of them found the SLO broken; none otherwise."""
    recent = _last(loads, now, config.grow_after_s, config.period_s)
    return recent if sum(_pressure(load, slo) > 1 for load in recent) >= MOST_OF * len(recent) else []


def _growth(
    now: float, pool: PoolBounds, loads: Sequence[PoolLoad], slo: SloConfig, config: AutoscalingConfig
) -> tuple[float, Resize] | None:
    """With how pressing it is."""
    recent = _breaking(now, loads, slo, config)
    if not recent or pool.is_waiting or pool.wanted >= pool.max_nodes:
        return None
    pressure = math.fsum(_pressure(load, slo) for load in recent) / len(recent)
    more = 1 if pressure < 2 else max(1, pool.wanted // 2)
    size = min(pool.max_nodes, pool.wanted + more)
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
    quiet_s: float,
) -> Resize | None:
    window = _last(loads, now, quiet_s, config.period_s)
    size = pool.wanted - 1
    if not window or size < max(1, pool.min_nodes):
        return None
    # The worst stretch counts, as long as one that makes a pool grow.
    demand = _highest_mean([_demand(load, slo) for load in window], config)
    if (
        max(max(_queue_pressure(load, slo), _wait_pressure(load, slo)) for load in window) > 1
        or demand > ROOM_TO_SPARE * size
    ):
        return None
    written = _highest_mean([load.written_per_s for load in window], config)
    for breach in breaches:
        slow = breach.written_per_s and written > CLEARLY_LOWER * breach.written_per_s
        if size <= breach.nodes and (slow or demand > CLEARLY_LOWER * breach.demand):
            return None
    why = (
        f"{pool.role.value}: from {pool.wanted} to {size}: in {quiet_s:.0f} s "
        f"{size} would have been {demand / size:.0%} loaded at most"
    )
    return Resize(pool.role, size, why, None)


def _last(loads: Sequence[PoolLoad], now: float, seconds: float, period_s: float) -> Sequence[PoolLoad]:
    """The looks of the last `seconds`; none, when they do not reach back so far."""
    recent = [load for load in loads if load.at > now - seconds - period_s / 2]
    return recent if recent and recent[0].at <= now - seconds + period_s else []


def _pressure(load: PoolLoad, slo: SloConfig) -> float:
    """1 is the limit."""
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
        return f"prompts wait {load.queue_s:.1f} s, {limit:.1f} s of slo.ttft_s ({slo.ttft_s:g} s) may be waiting"
    if pressure == _wait_pressure(load, slo):
        limit = QUEUE_SHARE * slo.ttft_s
        return f"requests wait {load.wait_s:.1f} s for room, {limit:.1f} s of slo.ttft_s ({slo.ttft_s:g} s) may be waiting"
    if pressure == load.blocks / BLOCKS_LIMIT:
        return f"{load.blocks:.0%} of its blocks are taken, {BLOCKS_LIMIT:.0%} may be"
    return (
        f"a token takes {1000 * load.step_s:.0f} ms, slo.inter_token_s is {1000 * slo.inter_token_s:.0f} ms"
    )


def _highest_mean(demands: Sequence[float], config: AutoscalingConfig) -> float:
    length = min(len(demands), max(1, round(config.grow_after_s / config.period_s)))
    sums = [0.0, *itertools.accumulate(demands)]
    return max(end - start for start, end in zip(sums, sums[length:], strict=False)) / length


def _demand(load: PoolLoad, slo: SloConfig) -> float:
    """The load in nodes' worth. All of it grows no faster than its share when there are fewer nodes: engines' time
    and blocks are shared out, and a step takes at most as much longer as it has more to do."""
    shares = [load.blocks / BLOCKS_LIMIT]
    if load.reads_prompts and not load.writes_tokens:
        shares.append(load.busy)  # a decode node computes all the time, for one answer or for fifty
    if load.writes_tokens:
        shares.append(load.step_s / slo.inter_token_s)
    return load.nodes * max(shares)
