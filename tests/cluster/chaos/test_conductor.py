"""Chaos strikes once at a time, and again only when the cluster is whole."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, replace

import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.chaos import conductor as module
from tandem.cluster.chaos.conductor import Conductor, left_behind
from tandem.cluster.chaos.plan import Blow, ProcessKind, Strike
from tandem.cluster.control import ClusterView
from tandem.wire.nodes import Role
from tests.cluster.chaos.views import cluster, node


@dataclass(frozen=True)
class Process:
    name: str
    pid: int
    started: int = 7


class Hands:
    """A cluster in which what is killed is missing for a few looks, and comes back as another process."""

    def __init__(self, looks: int = 2) -> None:
        self.looks = looks
        self.away = 0
        self.sent: list[tuple[str, signal.Signals, float | None]] = []
        self.processes: dict[str, Process] = {}

    async def view(self) -> ClusterView:
        if self.away:
            self.away -= 1
            gone = self.sent[-1][0]
            if gone == "controller":
                raise Unavailable("the controller does not answer")
            whole = cluster()
            return cluster(nodes=[one for one in whole.nodes if one.node_id != gone])
        return cluster()

    async def find(self, name: str) -> Process:
        return self.processes.setdefault(name, Process(name, 100 + len(self.processes)))

    async def send(self, victim: Process, number: signal.Signals, wake_after_s: float | None) -> None:
        self.sent.append((victim.name, number, wake_after_s))
        if number == signal.SIGKILL:
            self.away = self.looks
            self.processes[victim.name] = replace(victim, pid=victim.pid + 1000)


def strike(kind: ProcessKind, blow: Blow = Blow.KILL, at_s: float = 0.0) -> Strike:
    return Strike(at_s, blow, kind, 0.01, 0.0)


def run(hands: Hands, *strikes: Strike) -> Conductor[Process]:
    made: Conductor[Process] = Conductor(hands, lambda text: None, look_every_s=0.0)
    asyncio.run(made.run(strikes))
    return made


def test_a_node_is_killed_and_the_next_blow_waits_for_its_successor() -> None:
    hands = Hands()
    made = run(hands, strike(ProcessKind.DECODE), strike(ProcessKind.PREFILL))
    assert [name for name, _, _ in hands.sent] == ["decode-0", "prefill-0"]
    assert [one.whole_after_s is not None for one in made.struck] == [True, True]
    assert hands.away == 0
    made = run(Hands(looks=5), strike(ProcessKind.CONTROLLER))
    assert made.struck[0].whole_after_s is not None, "a controller that says nothing is waited for"


def test_a_stop_names_how_long_it_lasts_and_ends_by_itself() -> None:
    hands = Hands()
    made = run(hands, strike(ProcessKind.DECODE, Blow.STOP))
    assert hands.sent == [("decode-0", signal.SIGSTOP, 0.01)]
    assert made.struck[0].whole_after_s is not None
    assert made.struck[0].whole_after_s >= 0.01


def test_the_same_process_as_before_is_no_cluster_that_has_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unharmed(Hands):
        async def send(self, victim: Process, number: signal.Signals, wake_after_s: float | None) -> None:
            self.sent.append((victim.name, number, wake_after_s))

    monkeypatch.setattr(module, "WHOLE_WITHIN_S", 0.02)
    made = run(Unharmed(), strike(ProcessKind.DECODE))
    assert made.struck[0].whole_after_s is None


def test_a_cluster_that_does_not_mend_is_not_struck_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE_WITHIN_S", 0.02)
    hands = Hands(looks=10**9)
    made = run(hands, strike(ProcessKind.DECODE), strike(ProcessKind.PREFILL))
    assert len(hands.sent) == 1
    assert "missing: 1 decode" in made.struck[0].detail


def test_a_blow_that_cannot_be_dealt_is_told_and_the_last() -> None:
    class OutOfReach(Hands):
        async def find(self, name: str) -> Process:
            raise Unavailable(f"{name} does not say which process it is")

    hands = OutOfReach()
    made = run(hands, strike(ProcessKind.DECODE), strike(ProcessKind.PREFILL))
    assert (made.struck, hands.sent) == ([], [])
    assert "could not be dealt: decode-0 does not say" in made.failure


def test_blocks_that_did_not_come_back_are_named_with_their_node() -> None:
    view = cluster(nodes=[node("prefill-0", Role.PREFILL, held=3, free=97), node("decode-0", Role.DECODE)])
    assert left_behind(view) == ["prefill-0: held blocks 3, blocks not free 3"]
    seconds, left = asyncio.run(Conductor(Hands(), print, look_every_s=0.0).until_quiet())
    assert seconds is not None
    assert left == []
