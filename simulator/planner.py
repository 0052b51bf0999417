"""Searches for the cheapest cluster that serves a traffic within its limits: the number of nodes of each role, and the settings.

Each candidate is simulated. A simulation ends as soon as it is certain that its candidate misses the limits, so most of them are short.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import PoolConfig, PoolsConfig
from tandem.simulator.costs import Width
from tandem.simulator.outcome import SimulationReport
from tandem.wire.nodes import ENGINE_ROLES, Role

# Settings that may serve a traffic better than the defaults. They are tried in this order, each on top of those that have helped.
VARIANTS: tuple[Mapping[str, str], ...] = (
    {"router.policy": "prefix_affinity"},
    {"scheduler.max_num_batched_tokens": "8192"},
    {"scheduler.max_num_batched_tokens": "1024"},
    {"scheduler.step_target_ms": "40"},
    {"scheduler.step_target_ms": "160"},
)
# A setting is changed only if this share more of the requests keeps the limits.
WORTH = 0.002
# The speeds at which the traffic is played to find what fails first.
FASTER = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0)

_BREAKS = {
    "ttft": "the first token comes too late",
    "itl": "tokens come too slowly",
    "tpot": "tokens come too slowly on average",
    "e2e": "the whole answer comes too late",
    "refused": "the router refuses requests",
    "failed": "requests fail",
}


class Widths(msgspec.Struct, frozen=True, order=True):
    """The width of the nodes of each role."""

    prefill: Width = Width()
    decode: Width = Width()
    aggregated: Width = Width()

    def of(self, role: Role) -> Width:
        found: Width = getattr(self, role.value)
        return found


class PoolSizes(msgspec.Struct, frozen=True, order=True):
    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    widths: Widths = Widths()

    def of(self, role: Role) -> int:
        return int(getattr(self, role.value))

    def with_size(self, role: Role, size: int) -> PoolSizes:
        return msgspec.structs.replace(self, **{role.value: size})

    def pools(self, given: PoolsConfig) -> PoolsConfig:
        """The given pools with these sizes and widths; the autoscaler must not change the sizes."""
        prefill, decode, aggregated = (
            msgspec.structs.replace(
                given.of(role),
                nodes=self.of(role),
                min=PoolConfig().min,
                max=None,
                tensor_parallel=self.widths.of(role).tensor_parallel,
                pipeline_parallel=self.widths.of(role).pipeline_parallel,
            )
            for role in ENGINE_ROLES
        )
        return PoolsConfig(prefill=prefill, decode=decode, aggregated=aggregated)

    def cost(self, money: Mapping[str, float]) -> float:
        """The cost of an hour. Each rank has its own device, and `money` has the price of a device for each role."""
        return math.fsum(self.of(role) * self.widths.of(role).ranks * money[role.value] for role in ENGINE_ROLES)

    def __str__(self) -> str:
        return ", ".join(
            f"{self.of(role)} {role.value}" + (f" ({width})" if (width := self.widths.of(role)).ranks > 1 else "")
            for role in ENGINE_ROLES
            if self.of(role)
        )


class Trial(msgspec.Struct, frozen=True):
    """One simulated cluster, and its report."""

    layout: PoolSizes
    settings: dict[str, str]
    cost: float  # per hour
    attainment: float  # of all requests; if the trial was given up, those that had kept the limits by then
    goodput_per_s: float
    given_up: bool
    report: SimulationReport

    @property
    def busy(self) -> dict[str, float]:
        """By role: the share of the time in which its nodes compute, on average."""
        shares: dict[str, list[float]] = {}
        for load in self.report.nodes:
            shares.setdefault(load.role, []).append(load.busy)
        return {role: math.fsum(values) / len(values) for role, values in shares.items()}


class Plan(msgspec.Struct, frozen=True):
    chosen: Trial | None
    trials: list[Trial]
    why: list[str]
    breaks_first: str


Evaluate = Callable[[PoolSizes, Mapping[str, str], float], SimulationReport]
"""Simulates the layout with these settings; the last argument is the speed at which the traffic is played."""


class Planner:
    def __init__(
        self,
        evaluate: Evaluate,
        money: Mapping[str, float],
        target: float,
        most_nodes: int,
        least: Mapping[Role, Mapping[Width, int]],
    ) -> None:
        """`target`: the share of the requests that must keep the limits. `most_nodes`: the most nodes of a role to try. `least`: by role and
        width, the fewest nodes that have enough time for the traffic's work."""
        self._evaluate = evaluate
        self._money = money
        self._target = target
        self._most = most_nodes
        self._least = least
        self._trials: dict[tuple[PoolSizes, tuple[tuple[str, str], ...]], Trial] = {}

    def plan(self) -> Plan:
        found = [*self._of_each_width(self._aggregated, (Role.AGGREGATED,))]
        found += self._of_each_width(self._separate, (Role.PREFILL, Role.DECODE))
        if not found:
            return Plan(None, list(self._trials.values()), [self._why_none()], "")
        cheapest = [
            min(kind, key=lambda trial: trial.cost)
            for kind in (
                [trial for trial in found if trial.layout.aggregated],
                [trial for trial in found if not trial.layout.aggregated],
            )
            if kind
        ]
        chosen = self._with_settings(min(cheapest, key=lambda trial: trial.cost))
        why = [*self._why(chosen, cheapest), *self._why_this_width(chosen, found)]
        return Plan(chosen, list(self._trials.values()), why, self._breaks_first(chosen))

    def _of_each_width(self, search: Callable[[Widths], Trial | None], roles: Sequence[Role]) -> Iterator[Trial]:
        """Yields the cheapest sufficient cluster of each combination of widths. Skips a combination if even its lower bound costs as much
        as a sufficient cluster that was already found."""
        cheapest = math.inf
        for chosen in itertools.product(*(self._least[role] for role in roles)):
            widths = Widths(**{role.value: width for role, width in zip(roles, chosen, strict=True)})
            fewest = {role.value: self._fewest_of(role, widths) for role in roles}
            if PoolSizes(**fewest, widths=widths).cost(self._money) >= cheapest:
                continue
            trial = search(widths)
            if trial is not None:
                cheapest = min(cheapest, trial.cost)
                yield trial

    def _fewest_of(self, role: Role, widths: Widths) -> int:
        return min(max(self._least[role][widths.of(role)], 1), self._most)

    def _try(self, layout: PoolSizes, settings: Mapping[str, str] | None = None) -> Trial:
        settings = dict(settings or {})
        key = layout, tuple(sorted(settings.items()))
        found = self._trials.get(key)
        if found is None:
            report = self._evaluate(layout, settings, 1.0)
            found = self._trials[key] = Trial(
                layout,
                settings,
                layout.cost(self._money),
                report.attainment or 0.0,
                report.goodput_per_s or 0.0,
                report.given_up,
                report,
            )
        return found

    def _is_enough(self, trial: Trial) -> bool:
        return not trial.given_up and trial.attainment >= self._target

    def _fewest(self, layout: PoolSizes, role: Role, settings: Mapping[str, str] | None = None) -> PoolSizes | None:
        """The layout with the fewest nodes of the role that are enough: doubles the number until it is enough, then bisects. None if
        `most_nodes` are not enough."""
        low = high = self._fewest_of(role, layout.widths)
        while not self._is_enough(self._try(layout.with_size(role, high), settings)):
            if high >= self._most:
                return None
            low, high = high + 1, min(2 * high, self._most)
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(self._try(layout.with_size(role, middle), settings)):
                high = middle
            else:
                low = middle + 1
        return layout.with_size(role, high)

    def _aggregated(self, widths: Widths) -> Trial | None:
        """Searches with the default settings first. If no size is enough, tries other settings, because prompts delay answers here."""
        for settings in ({}, *VARIANTS):
            found = self._fewest(PoolSizes(widths=widths), Role.AGGREGATED, settings)
            if found is not None:
                return self._try(found, settings)
        return None

    def _separate(self, widths: Widths) -> Trial | None:
        """Grows both pools together, in proportion to their work, until they are enough. Then shrinks each pool, the dearer one first."""
        prefill, decode = (self._fewest_of(role, widths) for role in (Role.PREFILL, Role.DECODE))
        layout = PoolSizes(prefill, decode, widths=widths)
        while not self._is_enough(self._try(layout)):
            if max(layout.prefill, layout.decode) >= self._most:
                return None
            prefill, decode = (min(self._most, math.ceil(1.5 * size)) for size in (layout.prefill, layout.decode))
            layout = PoolSizes(prefill, decode, widths=widths)
        for role in sorted((Role.PREFILL, Role.DECODE), key=lambda role: -self._money[role.value]):
            layout = self._fewest(layout, role) or layout
        return self._try(layout)

    def _with_settings(self, trial: Trial) -> Trial:
        """Keeps each setting that serves more of the requests. Then removes nodes as long as the rest are enough with these settings."""
        for variant in VARIANTS:
            if variant.items() <= trial.settings.items():
                continue
            other = self._try(trial.layout, {**trial.settings, **variant})
            if self._is_enough(other) and other.attainment > trial.attainment + WORTH:
                trial = other
        if trial.settings:
            for role in ENGINE_ROLES:
                while (size := trial.layout.of(role)) > 1:
                    fewer = self._try(trial.layout.with_size(role, size - 1), trial.settings)
                    if not self._is_enough(fewer):
                        break
                    trial = fewer
        return trial

    # --- explanations

    def _why_none(self) -> str:
        nearest = max(self._trials.values(), key=lambda trial: trial.attainment)
        return (
            f"no cluster of up to {self._most} nodes of a role keeps the limits for {self._target:.0%} of the requests; "
            f"nearest: {nearest.layout}, where {nearest.attainment:.1%} had kept them when it was given up. {_worst_of(nearest.report)}"
        )

    def _why(self, chosen: Trial, best: Sequence[Trial]) -> Iterator[str]:
        for trial in best:
            if trial.layout != chosen.layout and bool(trial.layout.aggregated) != bool(chosen.layout.aggregated):
                yield (f"{trial.layout} keep the limits too, for {trial.cost:.2f} an hour, not {chosen.cost:.2f}")
        kinds = {bool(trial.layout.aggregated) for trial in best}
        if len(kinds) == 1:
            other = "separate pools" if chosen.layout.aggregated else "aggregated nodes"
            yield f"{other} do not keep the limits at any size up to {self._most}"
        for role in ENGINE_ROLES:
            size = chosen.layout.of(role)
            fewer = self._trials.get((chosen.layout.with_size(role, size - 1), tuple(sorted(chosen.settings.items()))))
            if size and fewer is not None:
                yield f"with {size - 1} {role.value} node{'s' * (size != 2)}: {_worst_of(fewer.report)}"
        shown = ", ".join(f"{role} nodes {share:.0%}" for role, share in chosen.busy.items())
        yield f"on average {shown} of the time are computing"
        if chosen.settings:
            names = ", ".join(f"{name}: {value}" for name, value in chosen.settings.items())
            yield f"with {names} more of the requests are within the limits than without"

    def _why_this_width(self, chosen: Trial, found: Sequence[Trial]) -> Iterator[str]:
        others = [
            trial
            for trial in found
            if trial.layout.widths != chosen.layout.widths
            and bool(trial.layout.aggregated) is bool(chosen.layout.aggregated)
        ]
        if others:
            nearest = min(others, key=lambda trial: trial.cost)
            yield f"of other widths {nearest.layout} keep the limits, for {nearest.cost:.2f} an hour"
        elif any(len(widths) > 1 for widths in self._least.values()):
            yield "no other width keeps the limits for less"

    def _breaks_first(self, chosen: Trial) -> str:
        for factor in FASTER:
            report = self._evaluate(chosen.layout, chosen.settings, factor)
            if report.given_up or (report.attainment or 0.0) < self._target:
                return f"at {factor:g} times the traffic: {_worst_of(report)}"
        return f"nothing, up to {FASTER[-1]:g} times the traffic"


def _worst_of(report: SimulationReport) -> str:
    if not report.misses:
        return "too few of the requests are within the limits"
    cause, count = max(report.misses.items(), key=lambda miss: miss[1])
    fullest = max(report.nodes, key=lambda load: load.most_blocks, default=None)
    text = f"{_BREAKS[cause]} for {count} requests"
    if fullest is not None and fullest.most_blocks > 0.95:
        text += f" (the blocks of {fullest.node_id} were all taken)"
    return text


def least_nodes(seconds_of_work: Mapping[Role, float], seconds: float) -> dict[Role, int]:
    """The fewest nodes of each role whose time covers the work."""
    if seconds <= 0:
        raise ConfigurationError("the traffic must last longer than one moment to plan for it")
    return {role: max(1, math.ceil(work / seconds)) for role, work in seconds_of_work.items()}
