"""The soak test kills one node at a time, and the next one only when the cluster is whole again with a new node."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from benchmarks.soaking import cluster
from benchmarks.soaking.cluster import Killer, NodeLook
from tandem.base.errors import DeadlineExceeded

TITLES = {1: "ray::RouterActor", 2: "ray::PrefillActor.hold", 3: "ray::DecodeActor", 4: "tandem serve"}
NODES = [NodeLook("p", "a", "ready", None, 5, 5), NodeLook("d", "b", "ready", None, 5, 5)]


class View:
    """What the router says, one answer after the other; the last one for ever."""

    def __init__(self, *answers: list[NodeLook]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def nodes(self) -> list[NodeLook]:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(cluster, "title_of", lambda process: TITLES.get(process, ""))
    monkeypatch.setattr(
        "benchmarks.soaking.cluster.os.kill", lambda process, number: found.append((process, number))
    )
    monkeypatch.setattr(cluster, "_LOOK_EVERY_S", 0.0)
    return found


def renewed(node: NodeLook) -> NodeLook:
    return msgspec.structs.replace(node, incarnation=node.incarnation + "0")


def killer(view: View, processes: Callable[[], list[int]] = lambda: list(TITLES)) -> Killer:
    return Killer(view, processes, 1.0, seed=1)  # type: ignore[arg-type]


def test_only_nodes_are_killed_and_it_waits_until_a_successor_serves(
    killed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [msgspec.structs.replace(NODES[0], state="lost", unusable="it is silent"), NODES[1]]
    starting = [
        msgspec.structs.replace(renewed(NODES[0]), state="unknown", unusable="not heard of yet"),
        NODES[1],
    ]
    whole = [renewed(NODES[0]), NODES[1]]
    view = View(NODES, NODES, lost, lost[1:], starting, whole)
    ticks = itertools.count()
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    made = killer(view)
    asyncio.run(made.kill_one())
    ((process, number),) = killed
    assert process in (2, 3)
    assert number == signal.SIGKILL
    assert view.asked == 6, "the same epochs as before are not a cluster that has mended"
    (kill,) = made.kills
    assert kill.victim == TITLES[process]
    # The clock is looked at when it begins, at the kill, after each of four looks, and when it is whole.
    assert (kill.at_s, kill.whole_after_s) == (1.0, 5.0)


def test_over_time_every_node_has_its_turn(killed: list[tuple[int, int]]) -> None:
    for seed in range(8):
        view = View(NODES, [renewed(node) for node in NODES])
        asyncio.run(Killer(view, lambda: list(TITLES), 1.0, seed).kill_one())  # type: ignore[arg-type]
    assert {process for process, _ in killed} == {2, 3}


def test_a_victim_without_a_successor_is_said(
    killed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "WHOLE_WITHIN_S", 0.0)
    with pytest.raises(DeadlineExceeded, match="has no successor"):
        asyncio.run(killer(View(NODES)).kill_one())
