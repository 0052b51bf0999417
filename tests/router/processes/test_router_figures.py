"""The counters of all router processes on a port: their sum is right and never falls, whichever process is asked and whichever ends."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.router.processes.figures import ENDED_KEPT, Family, Figures, KnownFigures, SharedFigures, merged
from tandem.router.processes.sockets import SiblingProcesses

COUNTS = st.dictionaries(st.sampled_from(["stop", "length", "error"]), st.integers(0, 10**6))


def figures(counts: dict[str, int], running: int, wait: int, created: int = 0, number: int = 1) -> Figures:
    counters = [("ended_total", {"how": how}, float(count)) for how, count in counts.items()]
    return Figures(
        number,
        [
            Family("ended", "text", "counter", [*counters, ("ended_created", {}, float(created))]),
            Family("running", "text", "gauge", [("running", {}, float(running))]),
            Family(
                "tandem_router_queue_oldest_seconds",
                "text",
                "gauge",
                [("tandem_router_queue_oldest_seconds", {}, float(wait))],
            ),
        ],
    )


def values(families: list[Family]) -> dict[tuple[str, str], float]:
    return {(name, labels.get("how", "")): value for family in families for name, labels, value in family.samples}


@given(st.lists(st.tuples(COUNTS, st.integers(0, 99), st.integers(0, 99), st.booleans()), min_size=1))
def test_counters_are_sums_of_all_and_gauges_of_the_living(
    processes: list[tuple[dict[str, int], int, int, bool]],
) -> None:
    every = [figures(counts, running, wait, at) for at, (counts, running, wait, _) in enumerate(processes)]
    living = [one for one, (*_, lives) in zip(every, processes, strict=True) if lives]
    found = values(merged(every, living))
    for how in {how for counts, *_ in processes for how in counts}:
        assert found["ended_total", how] == sum(counts.get(how, 0) for counts, *_ in processes)
    assert found["ended_created", ""] == 0
    running = [(running, wait) for _, running, wait, lives in processes if lives]
    assert found.get(("running", ""), 0) == sum(one for one, _ in running)
    assert found.get(("tandem_router_queue_oldest_seconds", ""), 0) == max((w for _, w in running), default=0)


def test_a_port_is_healthy_when_each_of_its_processes_is() -> None:
    def told(health: float) -> Figures:
        sample = ("tandem_router_healthy", dict[str, str](), health)
        return Figures(1, [Family("tandem_router_healthy", "text", "gauge", [sample])])

    for states, healthy in (([1, 1], 1), ([1, 0], 0)):
        every = [told(state) for state in states]
        assert values(merged(every, every))["tandem_router_healthy", ""] == healthy


class _Process(Collector):
    """A router process that counts, and tells another one its figures, as through its desk."""

    def __init__(self) -> None:
        self.stopped = 0
        self.figures = SharedFigures(self, SiblingProcesses())

    def collect(self) -> list[Metric]:
        ended = CounterMetricFamily("ended", "text", labels=["how"])
        ended.add_metric(["stop"], self.stopped)
        return [ended]


@given(st.lists(st.tuples(st.sampled_from(["count", "ask", "end", "start"]), st.integers(0, 9)), max_size=40))
@example([("start", 0), ("start", 0), ("count", 1), ("ask", 0), ("end", 0), ("end", 0), ("ask", 0)])
def test_the_sum_never_falls(events: list[tuple[str, int]]) -> None:
    """The asked process asks all others that live. A process may end silently; the others notice that before another one ends."""
    living, shown = [_Process()], 0.0
    for what, which in events:
        process = living[which % len(living)]
        match what:
            case "count":
                process.stopped += which
            case "start" if len(living) < ENDED_KEPT // 8:
                living.append(_Process())
                ask(living[-1], living[:-1])  # as soon as it is told of them
            case "end" if len(living) > 1:
                living.remove(process)
                for one in living:  # as each does when it is told who is left
                    ask(one, [other for other in living if other is not one])
            case "ask":
                total = ask(process, [other for other in living if other is not process])
                assert total >= shown
                shown = total


def ask(process: _Process, others: list[_Process]) -> float:
    asking = process.figures.telling()
    for other in others:
        answer = other.figures.hear(asking)
        process.figures.learn(answer.figures)
    told = process.figures.hear(KnownFigures("", {}))  # to one that knows nothing it tells all
    return values(merged(told.figures.values(), [told.figures[told.own]]))["ended_total", "stop"]
