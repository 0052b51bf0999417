"""Numbered lines under every kind of loss: what is delivered is right, in order and once, and nothing is lost in silence."""

from __future__ import annotations

import contextlib
import heapq
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import NodeLost
from tandem.wire.lines import RETRY_S, Letter, LetterToNode, LetterToRouter, Lines, Resend
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import Cancel, NodeCounters, NodeStatus, Ping, TokenBatch, TokenChunk

HEARTBEAT_S = 0.25


def a_status() -> NodeStatus:
    return NodeStatus("n", Role.DECODE, 1, NodeState.READY, 1, 1, 0, 0, 0, 0, 0, 0.0, NodeCounters())


class End:
    def __init__(self, world: World, name: str, epoch: int, letters, strangers: bool, **limits) -> None:
        self.name = name
        self.letters = letters
        self.got: list[int] = []  # what was delivered, in order
        self.begun: list[str] = []
        self.replaced: list[str] = []
        self.lines: Lines = Lines(
            epoch,
            lambda endpoint, frame: world.carry(endpoint, frame),
            lambda body: self.deliver(body),
            begun=lambda endpoint: self.on_begun(endpoint),
            replaced=self.replaced.append,
            meets_strangers=strangers,
            clock=lambda: world.now,
            **limits,
        )
        self.lines.endpoint = name

    def on_begun(self, endpoint: str) -> None:
        self.begun.append(endpoint)

    def deliver(self, body) -> None:
        if isinstance(body, Cancel):
            self.got.append(int(body.request_ids[0]))
        elif isinstance(body, TokenBatch):
            self.got.append(body.chunks[0].start)


class World:
    """A router and a node, and a network that does to each frame what the test says."""

    def __init__(self, **limits) -> None:
        self.now = 0.0
        self.cut: set[str] = set()  # nothing arrives there
        self.fate = lambda: [0.001]  # after how long each copy of a frame arrives
        self._order = 0
        self._under_way: list[tuple[float, int, str, bytes]] = []
        self.router = End(self, "router", 11, LetterToRouter, strangers=False, **limits)
        self.node = End(self, "node", 22, LetterToNode, strangers=True, **limits)
        self.ends = {"router": self.router, "node": self.node}
        self.router.lines.meet("node", 22)
        self.sent = {"router": 0, "node": 0}
        self.beat()
        self.run(0.1)

    def carry(self, endpoint: str, frame: bytes) -> None:
        if endpoint in self.cut:
            return
        for delay in self.fate():
            self._order += 1
            heapq.heappush(self._under_way, (self.now + delay, self._order, endpoint, frame))

    def submit(self) -> None:
        """The router says something that matters."""
        self.sent["router"] += 1
        self.router.lines.send("node", Cancel("router", [str(self.sent["router"])]))

    def token(self) -> None:
        self.sent["node"] += 1
        self.node.lines.send("router", TokenBatch("n", 22, [TokenChunk("r", self.sent["node"], [1])]))

    def beat(self) -> None:
        self.router.lines.send("node", Ping("router"))
        with contextlib.suppress(NodeLost):  # it has not been heard yet
            self.node.lines.send("router", a_status())

    def run(self, seconds: float, *, beats: bool = False) -> None:
        end, next_beat = self.now + seconds, self.now + HEARTBEAT_S
        while True:
            due = self._under_way[0][0] if self._under_way else float("inf")
            at = min(due, next_beat if beats else float("inf"))
            if at > end:
                break
            self.now = max(self.now, at)
            if at == due:
                _, _, endpoint, frame = heapq.heappop(self._under_way)
                receiver = self.ends[endpoint]
                receiver.lines.receive(msgspec.msgpack.decode(frame, type=receiver.letters))
            else:
                self.beat()
                next_beat += HEARTBEAT_S
        self.now = end

    def lose(self, *ends: str) -> None:
        """A connection is reset: what is on its way is gone."""
        self._under_way = [item for item in self._under_way if item[2] not in ends]
        heapq.heapify(self._under_way)


def test_a_message_is_acknowledged_by_the_other_sides_next_heartbeat() -> None:
    world = World()
    sent = world.router.lines.send("node", Cancel("router", ["1"]))
    assert world.router.lines.acknowledged("node") < sent
    assert world.router.lines.unheard_since("node") == world.now
    world.run(HEARTBEAT_S + 0.05, beats=True)
    assert world.router.lines.acknowledged("node") == sent
    assert world.router.lines.unheard_since("node") is None


def test_a_message_that_cannot_get_there_stays_unacknowledged_while_the_other_side_speaks() -> None:
    world = World()
    world.cut.add("node")
    began = world.now
    world.submit()
    world.run(2.0, beats=True)
    assert world.router.lines.unheard_since("node") == began
    world.cut.clear()
    world.run(1.0, beats=True)
    assert world.node.got == [1]
    assert world.router.lines.unheard_since("node") is None


def test_what_the_buffer_no_longer_has_begins_a_new_line_and_both_sides_know() -> None:
    world = World(replay_frames=3)
    world.token()
    world.run(0.1)
    begun = len(world.router.begun)
    world.cut.add("router")
    for _ in range(5):
        world.token()
    world.cut.clear()
    world.run(2.0, beats=True)
    assert world.router.got == [1], "the rest is gone for good, and known to be"
    assert world.node.begun[-1] == "router", "the node lists what it holds"
    assert len(world.router.begun) == begun + 1
    assert world.node.lines.restarts == 1
    world.token()
    world.run(0.1)
    assert world.router.got == [1, 7]


def test_letters_of_other_incarnations_are_dropped_and_counted() -> None:
    world = World()
    node, received = world.node.lines, world.node.lines.received("router")

    def letter(epoch: int, to: int, number: int, what: str) -> Letter:
        return Letter("router", epoch, to, 1000, number, number, 0, 0, Cancel("router", [what]))

    node.receive(letter(11, 99, 1, "1"))
    assert (node.foreign, world.node.got) == (1, [])
    assert node.received("router") == received
    node.receive(letter(12, 22, 1, "2"))  # the router was started again at the same address
    assert (world.node.got, world.node.replaced) == ([2], ["router"])
    node.receive(letter(11, 22, 2, "3"))  # a late word of the one before
    assert (node.foreign, world.node.got) == (2, [2])
    world.router.lines.receive(Letter("stranger", 5, 11, 1, 1, 1, 0, 0, Cancel("x", ["9"])))
    assert world.router.lines.foreign == 1


def test_a_handler_that_fails_does_not_stop_the_line() -> None:
    world = World()
    broken = True

    def deliver(body) -> None:
        if broken:
            raise RuntimeError("boom")
        world.node.got.append(int(body.request_ids[0]))

    world.node.deliver = deliver  # type: ignore[method-assign]
    world.router.lines.send("node", Cancel("router", ["1"]))
    with pytest.raises(RuntimeError):
        world.run(0.1)
    broken = False
    world.router.lines.send("node", Cancel("router", ["2"]))
    world.run(0.1)
    assert world.node.got == [2]
    assert world.node.lines.gaps == 0


def test_asking_again_slows_down_while_the_answer_is_on_its_way() -> None:
    world = World()
    asked: list[Resend] = []
    carry = world.carry

    def watch(endpoint: str, frame: bytes) -> None:
        body = msgspec.msgpack.decode(frame, type=world.ends[endpoint].letters).body
        if endpoint == "router" and isinstance(body, Resend):
            asked.append(body)
        else:
            carry(endpoint, frame)

    world.carry = watch  # type: ignore[method-assign]
    world.submit()
    world.lose("node")
    world.run(20.0, beats=True)
    assert 4 <= len(asked) <= 24
    assert RETRY_S < HEARTBEAT_S


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    loss=st.floats(0, 0.5),
    steps=st.lists(
        st.sampled_from(
            ["submit", "token", "reset", "run", "run", "cut node", "cut router", "heal", "restart", "forget"]
        ),
        max_size=60,
    ),
    replay_frames=st.sampled_from([4, 50_000]),
)
def test_under_loss_doubling_reordering_and_resets_every_line_is_whole_or_known_to_be_broken(
    seed: int, loss: float, steps: list[str], replay_frames: int
) -> None:
    rng = random.Random(seed)
    world = World(replay_frames=replay_frames)

    def fate() -> list[float]:
        copies = 0 if rng.random() < loss else 1 + (rng.random() < 0.1)
        return [rng.expovariate(20.0) for _ in range(copies)]

    world.fate = fate
    restarted = 0
    for step in steps:
        if step == "submit":
            world.submit()
        elif step == "token":
            try:
                world.token()
            except NodeLost:
                world.sent["node"] -= 1
        elif step == "reset":
            world.lose("router", "node")
        elif step == "run":
            world.run(rng.random(), beats=True)
        elif step == "restart":
            world.router.lines.begin_anew("node")
            restarted += 1
        elif step == "forget":
            world.node.lines.forget("router")
            restarted += 1
        elif step == "heal":
            world.cut.clear()
        else:
            world.cut.add(step.removeprefix("cut "))
    world.cut.clear()
    world.fate = lambda: [0.001]
    world.run(8.0, beats=True)
    for end, speaker in ((world.node, "router"), (world.router, "node")):
        if not restarted:
            assert end.got == sorted(set(end.got)), "in order, each at most once"
        broken = restarted or world.ends[speaker].lines.restarts
        if not broken:
            assert end.got == list(range(1, world.sent[speaker] + 1)), "and nothing is lost"
    # Whatever happened, both lines work from here on, and everything is acknowledged.
    world.submit()
    world.token()
    world.run(2.0, beats=True)
    assert world.node.got[-1] == world.sent["router"]
    assert world.router.got[-1] == world.sent["node"]
    assert world.router.lines.unheard_since("node") is None
    assert world.node.lines.unheard_since("router") is None
