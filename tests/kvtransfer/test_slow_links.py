"""Slow links: a transfer is given up if and only if computing the rest takes less time than waiting."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from kv_fake_network import BLOCK_BYTES, BLOCK_SIZE, SETTINGS, Node, Receive, Send, World

from tandem.kvtransfer.protocol.commands import ComputesAt
from tandem.kvtransfer.protocol.side import LinkMeter, LinkPace, Patience
from tandem.kvtransfer.protocol.transport import Activity, Direction

TOO_SLOW = "too_slow"


class Link:
    """A producer, a consumer, and a link between them whose rate (blocks per second) the test changes."""

    def __init__(self, direction: Direction = Direction.PUSH, blocks_per_s: float = 1000.0) -> None:
        self.world = World(direction)
        self.blocks_per_s = blocks_per_s
        self.world.bytes_per_s = lambda: self.blocks_per_s * BLOCK_BYTES
        self.producer: Node = self.world.add("p", 11)
        self.consumer: Node = self.world.add("c", 22, skew=-700.0)
        self.count = 0

    def computes(self, node: Node, tokens_per_s: float) -> None:
        node.endpoint.execute(ComputesAt(tokens_per_s))

    def request(self, blocks: int, *, computed: bool = True) -> tuple[Receive, Send]:
        self.count += 1
        name, tokens = f"r{self.count}", [self.count * 100 + index for index in range(blocks * BLOCK_SIZE)]
        receive = Receive(name, f"t{self.count}", tokens, 0, [])
        send = Send(name, f"t{self.count}", tokens, self.consumer.address, [])
        self.consumer.start_receive(receive, self.producer.address)
        self.producer.start_send(send)
        self.world.deliver_all()
        if computed:
            self.producer.compute(send, len(tokens))
            self.producer.finish_send(send)
        return receive, send

    def pass_time(self, seconds: float) -> None:
        self.world.settle_messages(seconds)

    def seconds_until_over(self, receive: Receive, at_most: float = 60.0) -> float:
        began = self.world.now
        while not receive.over:
            self.pass_time(SETTINGS.tick_s)
            assert self.world.now - began < at_most, "it was waited for"
        return self.world.now - began

    def outcomes(self) -> dict[str, int]:
        return dict(self.consumer.recorder.snapshot(0).outcomes)

    def nothing_is_left(self) -> bool:
        self.blocks_per_s = 1000.0
        until = self.world.now + SETTINGS.timeout_s + SETTINGS.lease_s
        while self.world.now < until:
            self.pass_time(1.0)
            if all(
                node.endpoint.is_idle and len(node.free) == len(node.memory) - 1 and not node.transport.moves
                for node in (self.producer, self.consumer)
            ):
                return True
        return False


@pytest.fixture(params=list(Direction))
def link(request: pytest.FixtureRequest) -> Link:
    return Link(Direction(request.param))


def test_its_blocks_stay_in_quarantine_while_they_may_be_written(link: Link) -> None:
    """`World` fails the test if a write lands in a free block."""
    link.computes(link.consumer, 1e4)
    link.blocks_per_s = 0.2
    receive, _ = link.request(20)
    link.seconds_until_over(receive)
    assert receive.quarantined
    assert link.consumer.recorder.snapshot(0).quarantined_blocks == len(receive.quarantined)
    link.pass_time(SETTINGS.timeout_s)
    assert not receive.quarantined
    assert link.nothing_is_left()


def test_without_any_word_of_how_fast_prompts_are_computed_a_transfer_is_waited_for(link: Link) -> None:
    link.blocks_per_s = 2.0
    receive, _ = link.request(20)
    link.seconds_until_over(receive)
    assert link.outcomes() == {"received": 1}


def test_a_consumer_that_has_computed_no_prompt_takes_the_producers_word(link: Link) -> None:
    link.computes(link.producer, 1e4)
    link.blocks_per_s = 2.0
    receive, _ = link.request(20)
    assert link.seconds_until_over(receive) < 3.0
    assert link.outcomes() == {TOO_SLOW: 1}


def test_a_prompt_that_is_still_computed_is_not_held_against_its_link(link: Link) -> None:
    link.computes(link.consumer, 1e4)
    receive, send = link.request(20, computed=False)
    for _ in range(5):
        link.pass_time(3.0)
        link.producer.compute(send, 4 * BLOCK_SIZE)
    link.producer.finish_send(send)
    link.seconds_until_over(receive)
    assert link.outcomes() == {"received": 1}


def test_the_next_transfer_over_a_slow_link_is_not_begun_and_a_later_one_finds_it_mended(link: Link) -> None:
    link.computes(link.consumer, 1e4)
    link.blocks_per_s = 0.5
    first, _ = link.request(20)
    link.seconds_until_over(first)
    second, _ = link.request(20)
    assert second.over
    assert not second.quarantined
    link.blocks_per_s = 1000.0
    link.pass_time(SETTINGS.keep_pace_s + 1.0)
    third, _ = link.request(20)
    link.seconds_until_over(third)
    assert link.outcomes() == {TOO_SLOW: 2, "received": 1}
    assert link.nothing_is_left()


def test_a_short_transfer_may_take_a_link_that_is_too_slow_for_a_long_one(link: Link) -> None:
    link.computes(link.consumer, 1e4)
    link.blocks_per_s = 4.0
    long, _ = link.request(40)
    link.seconds_until_over(long)
    link.pass_time(3.0)  # what it had posted has arrived
    short, _ = link.request(2)
    assert not short.over
    link.seconds_until_over(short)
    assert link.outcomes() == {TOO_SLOW: 1, "received": 1}


def test_a_consumer_that_stood_still_does_not_blame_the_link(link: Link) -> None:
    link.computes(link.consumer, 1e4)
    link.blocks_per_s = 10.0
    receive, _ = link.request(5)
    link.consumer.frozen = True
    link.pass_time(1.0)
    link.consumer.frozen = False
    link.seconds_until_over(receive)
    assert link.outcomes() == {"received": 1}


def test_while_a_link_is_full_its_thread_only_looks_again_soon(link: Link) -> None:
    """It would spin else."""
    link.blocks_per_s = 0.0
    link.request(20)
    link.pass_time(1.0)
    for node in (link.producer, link.consumer):
        assert node.endpoint.pump() is not Activity.DUE


@settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    direction=st.sampled_from(list(Direction)),
    rates=st.lists(
        st.tuples(st.floats(0.2, 8.0), st.sampled_from([0.0, 0.3, 2.0, 20.0, 500.0])), min_size=1, max_size=8
    ),
    sizes=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 30)), min_size=1, max_size=5),
    tokens_per_s=st.sampled_from([5.0, 60.0, 5000.0]),
)
def test_whatever_rates_do_every_transfer_ends_right_and_every_block_comes_back(
    direction: Direction, rates: list[tuple[float, float]], sizes: list[tuple[float, int]], tokens_per_s: float
) -> None:
    link = Link(direction)
    link.computes(link.consumer, tokens_per_s)
    waiting, receives = list(sizes), []
    for seconds, blocks_per_s in rates:
        link.blocks_per_s = blocks_per_s
        if waiting:
            _, blocks = waiting.pop()
            receives.append(link.request(blocks)[0])
        link.pass_time(seconds)
    assert link.nothing_is_left()
    assert all(receive.over for receive in receives)
    assert sum(link.outcomes().values()) == len(receives)


@settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    direction=st.sampled_from(list(Direction)),
    blocks_per_s=st.sampled_from([1.0, 5.0, 50.0]),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    share=st.floats(0.2, 1.0),
)
def test_a_steady_link_is_never_left_for_what_takes_longer(
    direction: Direction, blocks_per_s: float, sizes: list[int], share: float
) -> None:
    """Computing even the smallest takes as long as everything that goes through the link."""
    link = Link(direction, blocks_per_s)
    seconds = sum(sizes) / blocks_per_s / share
    link.computes(link.consumer, min(sizes) * BLOCK_SIZE / seconds)
    receives = [link.request(blocks)[0] for blocks in sizes]
    while not all(receive.over for receive in receives):
        link.pass_time(0.5)
    assert link.outcomes().get(TOO_SLOW, 0) == 0


@settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    direction=st.sampled_from(list(Direction)),
    before=st.floats(0.0, 3.0),
    after=st.sampled_from([0.0, 0.05, 0.5, 2.0]),
    blocks=st.integers(10, 60),
    tokens_per_s=st.sampled_from([40.0, 400.0, 4000.0]),
)
def test_after_a_drop_nothing_is_waited_for_much_longer_than_computing_takes(
    direction: Direction, before: float, after: float, blocks: int, tokens_per_s: float
) -> None:
    link = Link(direction, 20.0)
    link.computes(link.consumer, tokens_per_s)
    receive, _ = link.request(blocks)
    link.pass_time(before)
    link.blocks_per_s = after
    computing_s = blocks * BLOCK_SIZE / tokens_per_s
    # The last blocks of a pull may all be in flight when the link drops, and as long as some arrive the rest seem near.
    in_flight_s = 4 / after if direction is Direction.PULL and after >= 0.5 else 0.0
    waited = link.seconds_until_over(receive)
    assert waited < computing_s + in_flight_s + SETTINGS.patience_s + 4 * SETTINGS.pace_s
    assert link.nothing_is_left()


# ── the arithmetic ──


def test_a_link_is_measured_from_one_end_of_a_move_to_another() -> None:
    meter = LinkMeter(over_s=0.5)
    assert meter.bytes_per_s(0.0) is None
    for _ in range(4):
        meter.posted(100, 10.0)
    assert meter.bytes_per_s(10.4) is None
    assert meter.bytes_per_s(10.5) == pytest.approx(400 / 0.5)
    meter.moved(100, 11.0)
    assert meter.bytes_per_s(11.2) == pytest.approx(100.0), "as from one end to the next"
    meter.moved(100, 11.5)
    assert meter.bytes_per_s(11.5) == pytest.approx(200.0)
    assert meter.bytes_per_s(14.0) == pytest.approx(200 / 2.5), "it stands still, and seems slower with time"
    meter.moved(100, 14.0)
    meter.withdrawn(100)
    assert meter.bytes_per_s(14.0) is None
    meter.posted(100, 14.002)
    assert meter.bytes_per_s(14.1) is not None, "so short a pause is none"
    meter.withdrawn(100)
    meter.posted(100, 20.0)
    assert meter.bytes_per_s(20.2) is None, "what it moved before it was idle says nothing"
    assert meter.last_measured is not None
    assert meter.last_measured < 1000
    meter.moved(100, 20.01)
    assert meter.last_measured == pytest.approx(10_000), "a short move shows that it is no longer slow"


def test_a_link_that_waits_for_what_is_computed_is_not_slow() -> None:
    """A few layers at a time, each of which moves at once."""
    meter, now = LinkMeter(over_s=0.5), 5.0
    for _ in range(100):
        meter.posted(1000, now)
        assert meter.bytes_per_s(now + 0.0005) is None
        meter.moved(1000, now + 0.001)
        now += 0.03
    assert meter.last_measured is None


def test_what_is_served_in_turn_waits_for_as_much_of_the_others_as_it_has_itself() -> None:
    def heard(now: float, leaving: str = "") -> dict[str, float]:
        pace = LinkPace(10.0, 50, {"a": 10, "b": 100, "c": 40}, at=7.0)
        expected: dict[str, float] = {}

        def is_over(name: str, seconds: float) -> bool:
            expected[name] = seconds
            return name == leaving

        assert pace.leave(now, is_over) == ([leaving] if leaving else [])
        assert (leaving in pace.waiting) is False
        return expected

    assert heard(7.0) == {"b": 20.0, "c": 14.0, "a": 8.0}
    assert heard(8.5) == {"b": 18.5, "c": 12.5, "a": 6.5}
    assert heard(7.0, leaving="b") == {"b": 20.0, "c": 10.0, "a": 7.0}, "the others have the link to themselves"
    assert LinkPace(10.0, 50, {"a": 150}, at=7.0).longest_s == 20.0


def test_what_was_given_up_before_is_computed_first() -> None:
    now = 100.0
    patience = Patience(1.0, lambda: now)
    assert not patience.is_over(1e9, 10, None)
    assert not patience.is_over(1e9, 10, 0.0), "a peer may say anything"
    assert not patience.is_over(1.9, 100, 100.0)
    assert patience.is_over(2.1, 100, 100.0)
    assert not patience.is_over(2.9, 100, 100.0)
    now = 101.0
    assert patience.is_over(2.1, 100, 100.0)
