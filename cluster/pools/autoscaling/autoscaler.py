"""The loop that measures the pools with a `max` and resizes them as `autoscaling.decide` says."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from tandem.cluster.config import TandemConfig
from tandem.cluster.pools.autoscaling.load_meter import LoadMeter
from tandem.cluster.pools.autoscaling.rules import LONG, Breach, PoolBounds, Resize, at_its_limit, decide
from tandem.cluster.tasks import Clock
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeStatus


class Autoscaler:
    """Call `changed` for every change of a pool, whatever caused it: measurements from before it do not describe the pools
    as they are now."""

    def __init__(
        self,
        config: TandemConfig,
        clock: Clock,
        measure: Callable[[], Sequence[NodeStatus]],
        waits: Callable[[], float],  # how long requests wait in routers until a node has room
        pools: Callable[[], list[PoolBounds]],
        resize: Callable[[Resize], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._measure = measure
        self._waits = waits
        self._pools = pools
        self._resize = resize
        self._say = say
        self._at_limit: set[Role] = set()  # pools whose limit was reported, so that it is reported once
        self.configure(config)
        self._breaches: dict[Role, dict[int, Breach]] = {}

    def configure(self, config: TandemConfig) -> None:
        self._config = config.autoscaling
        self._slo = config.slo
        longest_s = LONG * self._config.shrink_after_s
        self._meter = LoadMeter(math.ceil(longest_s / self._config.period_s) + 1)
        self.changed()

    def changed(self) -> None:
        self._changed_at = dict.fromkeys(Role, self._clock.now())

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._config.period_s)
            self._meter.look(self._clock.now(), self._measure(), self._waits())
            pools = self._pools()
            changing = [pool.role for pool in pools if not pool.is_settled]
            if changing:
                # Only measurements after the end of its change count.
                self._changed_at |= dict.fromkeys(changing, self._clock.now())
                continue
            decision = decide(
                self._clock.now(),
                self._changed_at,
                self._meter.history,
                pools,
                {role: list(known.values()) for role, known in self._breaches.items()},
                self._slo,
                self._config,
            )
            if decision is not None:
                if decision.breach is not None:
                    self._breaches.setdefault(decision.role, {})[decision.breach.nodes] = decision.breach
                self._changed_at[decision.role] = self._clock.now()
                await self._resize(decision)
            for pool in pools:
                self._look_at_limit(pool)

    def _look_at_limit(self, pool: PoolBounds) -> None:
        now, history = self._clock.now(), self._meter.history
        why = at_its_limit(now, self._changed_at[pool.role], history, pool, self._slo, self._config)
        if why is None:
            self._at_limit.discard(pool.role)
        elif pool.role not in self._at_limit:
            self._at_limit.add(pool.role)
            self._say(why)
