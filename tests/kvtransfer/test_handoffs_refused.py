"""Wrong handoffs, each sent twelve times at random moments of a real transfer: every one is refused and counted, and the transfer that
it was sent into ends as it should."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice

import msgspec
import pytest
from kv_fake_network import SETTINGS, VOCAB_SIZE, Node, Receive, Send, World

from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.protocol.halves import token_hash
from tandem.kvtransfer.protocol.transport import Direction
from tandem.wire.handoff import HandoffNotice

TIMES = 12


class Scene:
    """A transfer that is cut off at a random moment."""

    def __init__(self, direction: Direction, seed: int) -> None:
        self.chance = random.Random(seed)
        self.direction = direction
        self.world = World(direction, ChecksumPolicy.OFF)  # which a notice without checksums would not get past
        self.producer: Node = self.world.add("p", 11)
        self.consumer: Node = self.world.add("c", 22, skew=self.chance.uniform(-1000, 1000))
        self.tokens = [self.chance.randrange(90) for _ in range(self.chance.randrange(1, 40))]
        self.receive = Receive("r1", "t1", self.tokens, 0, [])
        self.send = Send("r1", "t1", self.tokens, self.consumer.address, [])
        self._steps: list[Callable[[], object]] = [
            lambda: self.consumer.start_receive(self.receive, self.producer.address),
            lambda: self.producer.start_send(self.send),
            lambda: self.producer.compute(self.send, self.chance.randrange(1, 40)),
            lambda: self.producer.compute(self.send, 40),
            lambda: self.producer.finish_send(self.send),
        ]

    def some_steps(self, least: int = 0) -> None:
        for _ in range(self.chance.randint(least, len(self._steps))):
            self._steps.pop(0)()
            self.world.settle(self.chance.choice([0.0, 0.06, 0.2]))

    def all_steps(self) -> None:
        while self._steps:
            self._steps.pop(0)()
        self.world.settle(SETTINGS.lease_s + 1)

    def notice(self, **changed: object) -> HandoffNotice:
        blocks = -(-len(self.tokens) // 4)
        right = HandoffNotice(
            self.producer.identity.envelope(22),
            "t1",
            len(self.tokens),
            token_hash(self.tokens, None, None),
            sum(self.tokens) % 97,
            blocks * self.consumer.geometry.memory.block_bytes,
            blocks,
            [] if self.direction is Direction.PUSH else [list(range(1, blocks + 1))],
        )
        return msgspec.structs.replace(right, **changed)

    def deliver(self, notice: HandoffNotice) -> int:
        """Delivers the notice, and returns how many messages were refused because of it."""
        before = self.refused()
        self.world.network.insert(0, ("tcp://c", notice))
        self.world.deliver(0)
        return self.refused() - before

    def refused(self) -> int:
        return sum(self.consumer.recorder.snapshot(0).refused.values())

    def expect_everything_back(self) -> None:
        assert self.receive.over
        assert self.send.reported == 1
        for node in self.world.nodes.values():
            assert not node.transport.moves
            assert len(node.free) == len(node.memory) - 1
            assert node.recorder.snapshot(0).in_progress == 0


def unfinished(direction: Direction, cut_off: Callable[[Scene], None]) -> Iterator[Scene]:
    """Yields transfers that had not handed over when they were cut off, as many as the test needs."""

    def every() -> Iterator[Scene]:
        for seed in count():
            scene = Scene(direction, seed)
            cut_off(scene)
            if not scene.receive.finished:
                yield scene

    return islice(every(), TIMES)


@pytest.fixture(params=list(Direction))
def direction(request: pytest.FixtureRequest) -> Direction:
    return request.param  # type: ignore[no-any-return]


def expect_refused_and_the_right_one_taken(scene: Scene, notice: HandoffNotice) -> None:
    assert scene.deliver(notice) == 1
    scene.all_steps()
    assert scene.receive.finished
    scene.expect_everything_back()


def test_of_an_unknown_transfer_or_an_old_epoch(direction: Direction) -> None:
    for seed in range(TIMES):
        for old in ("", "sender_epoch", "receiver_epoch"):
            scene = Scene(direction, seed)
            scene.some_steps(least=1 if old else 0)
            envelope = scene.producer.identity.envelope(22)
            wrong = (
                {"envelope": msgspec.structs.replace(envelope, **{old: 10})} if old else {"transfer_id": "t-unknown"}
            )
            expect_refused_and_the_right_one_taken(scene, scene.notice(**wrong))


def test_replayed(direction: Direction) -> None:
    for seed in range(TIMES):
        scene = Scene(direction, seed)
        scene.all_steps()
        for _ in range(scene.chance.randrange(1, 4)):
            expect_refused_and_the_right_one_taken(scene, scene.notice())


def test_expired(direction: Direction) -> None:
    """The producer stood still until the consumer gave it up."""

    def stand_still(scene: Scene) -> None:
        scene.some_steps(least=1)
        scene.producer.frozen = True
        scene.world.settle(SETTINGS.timeout_s + SETTINGS.lease_s + 2)

    for scene in unfinished(direction, stand_still):
        assert scene.receive.failed
        assert scene.deliver(scene.notice()) == 1
        scene.producer.frozen = False
        scene.all_steps()
        scene.world.settle(SETTINGS.lease_s + 1)
        assert not scene.receive.finished
        scene.expect_everything_back()


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_hash": b"x" * 32},
        {"num_tokens": 9999},
        {"num_blocks": 3000},
        {"num_bytes": 17},
        {"first_token": -1},
        {"first_token": VOCAB_SIZE},
        {"first_token": 1 << 40},
    ],
)
def test_that_does_not_verify(direction: Direction, wrong: dict[str, object]) -> None:
    """A wrong notice from the right sender at the right time fails the transfer, and never becomes an answer."""
    for scene in unfinished(direction, lambda scene: scene.some_steps(least=1)):
        assert scene.deliver(scene.notice(**wrong)) == 1
        # Before the producer was told of the blocks, or after the right one has come, it costs nothing.
        was_looked_at = "notice_mismatch" in scene.consumer.recorder.snapshot(0).refused
        scene.all_steps()
        assert bool(scene.receive.finished) is not was_looked_at
        scene.expect_everything_back()
