"""Plans what happens to which kind of process, and when. The same seed gives the same plan."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.control import ClusterView

CONTROLLER = "controller"


class ProcessKind(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    ENCODE = "encode"
    ROUTER = "router"
    CONTROLLER = "controller"


class Blow(enum.StrEnum):
    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, and SIGCONT some seconds later


class Strike(msgspec.Struct, frozen=True):
    at_s: float  # since the beginning; it comes later if the cluster is not whole by then
    blow: Blow
    kind: ProcessKind
    stop_s: float  # of a stop
    draw: float  # from 0 to 1: chooses one of the kind's processes

    def choose(self, names: Sequence[str]) -> str:
        return sorted(names)[int(self.draw * len(names))]


class ChaosRules(msgspec.Struct, frozen=True):
    minutes: float = 5.0
    every_s: float = 30.0
    stop_s: float = 5.0
    kinds: tuple[ProcessKind, ...] = ()  # none: nodes and the controller, and routers if there are several
    blows: tuple[Blow, ...] = (Blow.KILL, Blow.STOP)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("minutes", "every_s", "stop_s"):
            if not 0 < getattr(self, name) <= 100_000:
                flag = name.removesuffix("_s").replace("_", "-")
                raise ConfigurationError(f"--{flag} must be above 0 and at most 100000, not {getattr(self, name):g}")


def processes_of(view: ClusterView) -> dict[ProcessKind, list[str]]:
    found: dict[ProcessKind, list[str]] = {ProcessKind.CONTROLLER: [CONTROLLER]}
    for node in view.nodes:
        if node.phase == "ready":
            found.setdefault(ProcessKind(node.role.value), []).append(node.node_id)
    for router in view.routers:
        if router.phase == "ready":
            found.setdefault(ProcessKind.ROUTER, []).append(router.name)
    return found


def chosen_kinds(rules: ChaosRules, view: ClusterView) -> list[ProcessKind]:
    """Returns the kinds of processes to strike. Raises ConfigurationError if the rules name a kind that the cluster
    does not run."""
    there = processes_of(view)
    if not rules.kinds:
        return [
            kind for kind in ProcessKind if kind in there and (kind is not ProcessKind.ROUTER or len(there[kind]) > 1)
        ]
    absent = [kind.value for kind in rules.kinds if kind not in there]
    if absent:
        raise ConfigurationError(
            f"--to {', '.join(absent)}: the cluster has no such process; it has {', '.join(kind.value for kind in there)}"
        )
    return list(dict.fromkeys(rules.kinds))


def make_plan(rules: ChaosRules, kinds: Sequence[ProcessKind]) -> list[Strike]:
    rng = random.Random(rules.seed)
    strikes = []
    at_s = rules.every_s
    while at_s < rules.minutes * 60:
        strikes.append(Strike(at_s, rng.choice(rules.blows), rng.choice(list(kinds)), rules.stop_s, rng.random()))
        at_s += rules.every_s
    if not strikes:
        raise ConfigurationError(
            f"--every {rules.every_s:g} leaves no time for a blow in --minutes {rules.minutes:g}: make --every smaller"
        )
    return strikes


def dangers(view: ClusterView, kinds: Sequence[ProcessKind], unresponsive_s: float, stop_s: float) -> list[str]:
    """Returns what the plan means for the cluster's users, one sentence each."""
    there = processes_of(view)
    found = []
    for kind in kinds:
        if len(there[kind]) == 1 and kind is ProcessKind.ROUTER:
            found.append("there is one router: every stream breaks when it ends, and clients have to ask again")
        elif len(there[kind]) == 1 and kind in (ProcessKind.DECODE, ProcessKind.AGGREGATED):
            found.append(f"there is one {kind.value} node: nothing is answered while it is away")
        elif len(there[kind]) == 1 and kind is ProcessKind.PREFILL:
            found.append("there is one prefill node: decode nodes compute the prompts themselves while it is away")
    if stop_s >= unresponsive_s:
        found.append(
            f"a process that is stopped for {stop_s:g} s is taken for dead after {unresponsive_s:g} s "
            "(timeouts.unresponsive_s), and replaced"
        )
    return found
