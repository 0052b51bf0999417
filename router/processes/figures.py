"""The routers' metrics as values, of one process or added up over all processes that share a port.

Counters and histograms are sums over every known process, ended ones included, so a sum never falls,
whichever process is asked. Gauges are of the processes that answer now.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tandem.router.page_state import SLOWEST_SHOWN, PageState, Pair, ProcessState
from tandem.router.processes.sockets import SiblingProcesses
from tandem.router.recent import LATEST, TROUBLES, WINDOW_S, Moment, Trouble

# How many ended processes are kept. Beyond that the oldest are forgotten, and the sums fall once.
ENDED_KEPT = 64
# Metrics of which the largest counts instead of the sum.
_LARGEST = frozenset({"tandem_router_queue_oldest_seconds", "tandem_known_cached_blocks"})
# And of which the smallest counts.
_SMALLEST = frozenset({"tandem_router_healthy"})


class Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]  # name, labels, value


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """The metrics of one process at one time."""

    number: int  # later figures have a higher number
    families: list[Family]


class KnownFigures(msgspec.Struct, array_like=True):
    """Exchanged between two processes: the figures of each incarnation of a process. If both know figures of
    the same one, the later count."""

    own: str
    figures: dict[str, Figures]
    numbers: dict[str, int] = {}  # what the asking process knows already


def family_of(metric: Metric) -> Family:
    samples = [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples]
    return Family(metric.name, metric.documentation, metric.type, samples)


def merged(all_of: Iterable[Figures], now: Iterable[Figures]) -> list[Family]:
    """Adds up figures. `all_of`: every known process; `now`: those that answer now."""
    living = {id(figures) for figures in now}
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[Any, ...], float]] = {}
    for figures in all_of:
        for family in figures.families:
            if family.kind == "gauge" and id(figures) not in living:
                continue
            families.setdefault(family.name, family)
            known = sums.setdefault(family.name, {})
            for name, labels, value in family.samples:
                key = name, *sorted(labels.items())
                before = known.get(key)
                known[key] = value if before is None else _together(name, before, value)
    return [
        msgspec.structs.replace(
            family, samples=[(name, dict(labels), value) for (name, *labels), value in sums[family.name].items()]
        )
        for family in families.values()
    ]


def _together(name: str, one: float, other: float) -> float:
    if name in _LARGEST:
        return max(one, other)
    if name in _SMALLEST or name.endswith("_created"):
        return min(one, other)
    return one + other


class AllFigures(Collector):
    """The sums as Prometheus reads them."""

    def __init__(self, families: list[Family], answers: dict[str, bool]) -> None:
        self._families = families
        self._answers = answers  # by name: which processes answer

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            metric.samples = [Sample(*sample) for sample in family.samples]
            yield metric
        up = GaugeMetricFamily(
            "tandem_router_process_up",
            "1 when a router process on this port answers the one that was asked",
            labels=["process"],
        )
        for name, answers in self._answers.items():
            up.add_metric([name], float(answers))
        yield up


class SharedFigures:
    """This process's figures, those that its siblings have told, and those of processes that have ended."""

    def __init__(self, own: Collector, siblings: SiblingProcesses) -> None:
        self._own = own
        self._siblings = siblings
        self._incarnation = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._known: dict[str, Figures] = {}
        siblings.answers["figures"] = self._answer

    @property
    def alone(self) -> bool:
        """Whether there is no other process, and never was one."""
        return not self._siblings.names and not self._known

    def _take(self) -> Figures:
        return Figures(next(self._numbers), [family_of(metric) for metric in self._own.collect()])

    def learn(self, told: Mapping[str, Figures]) -> None:
        for incarnation, figures in told.items():
            known = self._known.get(incarnation)
            if incarnation != self._incarnation and (known is None or known.number < figures.number):
                self._known.pop(incarnation, None)  # moves it to the end: the oldest are forgotten first
                self._known[incarnation] = figures
        for incarnation in list(self._known)[: -ENDED_KEPT - len(self._siblings.names)]:
            del self._known[incarnation]

    def telling(self) -> KnownFigures:
        return KnownFigures(
            self._incarnation,
            {self._incarnation: self._take()},
            {incarnation: figures.number for incarnation, figures in self._known.items()},
        )

    async def _answer(self, body: bytes) -> KnownFigures:
        return self.hear(msgspec.msgpack.decode(body, type=KnownFigures))

    def hear(self, asked: KnownFigures) -> KnownFigures:
        """Takes another process's figures, and returns those that it does not know."""
        self.learn(asked.figures)
        news = {
            incarnation: figures
            for incarnation, figures in self._known.items()
            if incarnation not in asked.figures and asked.numbers.get(incarnation, 0) < figures.number
        }
        return KnownFigures(self._incarnation, {**news, self._incarnation: self._take()})

    async def together(self) -> AllFigures:
        """Returns the figures of all processes. The others then know what this one has shown, and keep it if
        it ends."""
        asking = self.telling()
        own = asking.figures[self._incarnation]
        told, silent = await self._siblings.ask("figures", KnownFigures, asking)
        for answer in told.values():
            self.learn(answer.figures)
        answering = [own, *(self._known[answer.own] for answer in told.values())]
        names = {self._siblings.name: True} | dict.fromkeys(told, True) | dict.fromkeys(silent, False)
        return AllFigures(merged([own, *self._known.values()], answering), names)

    async def leave_behind(self) -> None:
        """Tells the others this process's figures, which they keep when it ends."""
        if self._siblings.names:
            await self._siblings.ask("figures", KnownFigures, self.telling())


def together(own: PageState, name: str, others: Mapping[str, PageState], silent: Sequence[str]) -> PageState:
    """Adds up the pages of several processes. `own`: the page of the asked process, whose name is `name`;
    nodes are taken from it."""
    pages = {name: own, **others}
    processes = [
        ProcessState(name, True, page.router.running, page.router.queued, page.router.unhealthy)
        for name, page in pages.items()
    ]
    routers = [page.router for page in pages.values()]
    router = msgspec.structs.replace(
        own.router,
        running=sum(one.running for one in routers),
        queued=sum(one.queued for one in routers),
        queue_limit=sum(one.queue_limit for one in routers),
        places=sum(one.places for one in routers),
        places_held=sum(one.places_held for one in routers),
        oldest_wait_s=max(one.oldest_wait_s for one in routers),
        processes=processes + [ProcessState(one, False) for one in silent],
    )
    all_of = list(pages.values())
    return msgspec.structs.replace(
        own,
        router=router,
        moving=_pairs(pair for page in all_of for pair in page.moving),
        moments=_moments(moment for page in all_of for moment in page.moments),
        latest=sorted((one for page in all_of for one in page.latest), key=lambda one: one.ended_at)[-LATEST:],
        slowest=heapq.nlargest(
            SLOWEST_SHOWN, (slow for page in all_of for slow in page.slowest), key=lambda slow: slow.excess
        ),
        troubles=_troubles(trouble for page in all_of for trouble in page.troubles),
    )


def _troubles(troubles: Iterable[Trouble]) -> list[Trouble]:
    """A request belongs to one process; a node's loss is seen by all."""
    found: dict[tuple[object, ...], Trouble] = {}
    for one in troubles:
        known = found.get(one.key, one)
        counts = [one.count] if known is one else [known.count, one.count]
        found[one.key] = msgspec.structs.replace(
            max(known, one, key=lambda each: each.at), count=max(counts) if one.what == "node" else sum(counts)
        )
    return sorted(found.values(), key=lambda one: -one.at)[:TROUBLES]


def _pairs(pairs: Iterable[Pair]) -> list[Pair]:
    found: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        key = (pair.source, pair.target)
        known = found.get(key)
        found[key] = (
            pair
            if known is None
            else Pair(
                *key, known.transfers + pair.transfers, known.tokens + pair.tokens, max(known.longest_s, pair.longest_s)
            )
        )
    return sorted(found.values(), key=lambda pair: -pair.transfers)


def _moments(moments: Iterable[Moment]) -> list[Moment]:
    found: dict[float, Moment] = {}
    for moment in moments:
        known = found.setdefault(moment.began, Moment(moment.began))
        for field in Moment.__struct_fields__:
            if field in ("worst_first_s", "restarts"):
                setattr(known, field, max(getattr(known, field), getattr(moment, field)))
            elif field != "began":
                setattr(known, field, getattr(known, field) + getattr(moment, field))
    latest = max(found, default=0.0)
    return [found[began] for began in sorted(found) if began > latest - WINDOW_S]
