"""The protocol against a network that loses, duplicates and reorders messages, nodes that freeze, and requests that are aborted: every
transfer ends once on each side, no write lands in a foreign block, and nothing wrong is accepted.

A history is a list of weighted events. Most of them are progress, because a network that only loses messages never reaches the states
worth testing. `World` checks the invariants; `settle` at the end shows that nothing hangs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from kv_fake_network import SETTINGS, Node, Receive, Send, World

from tandem.kvtransfer.protocol.commands import CancelReceive, ComputesAt
from tandem.kvtransfer.protocol.transport import Direction
from tandem.wire.handoff import (
    Envelope,
    HandoffAccepted,
    HandoffMessage,
    HandoffNotice,
    Refusal,
    RefusalCode,
    RegisterDestination,
    TransferClosed,
)

T = TypeVar("T")

REQUESTS = 4


class History:
    def __init__(
        self,
        direction: Direction,
        skew: float,
        block_sizes: tuple[int, int],
        moves_can_be_taken_back: bool,
        device: random.Random | None,
        choose: Callable[[int], int],
    ) -> None:
        self.world = World(direction)
        self.world.moves_can_be_taken_back = moves_can_be_taken_back
        # Up to three leases: no rule may count on how long a posted move takes.
        leases = [0.05, 0.3, 1.0, SETTINGS.lease_s, 3 * SETTINGS.lease_s]
        self.world.move_s = lambda: self.pick_within(leases)
        self.world.corrupts = lambda: self.pick_within([False] * 30 + [True])
        if device is not None:
            self.world.device_does = lambda: device.choice([0, 0, 1, 1, 2, 100])
        self.producer: Node = self.world.add("p", 11, block_size=block_sizes[0])
        self.consumer: Node = self.world.add("c", 22, skew, block_size=block_sizes[1])
        self._choose = choose
        for node in (self.producer, self.consumer):
            node.endpoint.execute(ComputesAt(50.0))  # slow links are left for computing
        self._count = 0
        self._waiting_sends: list[Send] = []
        self._waiting_receives: list[Receive] = []
        self._seen: list[tuple[str, HandoffMessage]] = []

    def pick_within(self, options: list[T]) -> T:
        """Picks an option in the middle of an event. It takes the first one when the history's choices are used up, because a history ends
        only between two events."""
        try:
            return self.pick(options)
        except StopIteration:
            return options[0]

    def pick(self, options: list[T]) -> T:
        return options[self._choose(len(options))]

    def happen(self) -> None:
        event = self.pick([event for weight, event in self._events() for _ in range(weight)])
        event()
        self.world.pump()
        for node in self.world.nodes.values():
            assert len(node.free) == len(set(node.free))

    def _events(self) -> list[tuple[int, Callable[[], None]]]:
        world = self.world
        steppable = [] if self.producer.frozen else self.open_sends()
        events: list[tuple[int, Callable[[], None]]] = [
            (3, self._time_passes),
            (1, self._much_time_passes),
            (1, self._freeze_or_thaw),
            (1, self._links_stall_or_go_on),
            (1, self._address_refuses_or_accepts),
        ]
        if self._count < REQUESTS:
            events.append((4, self._a_request))
        computing = [send for send in steppable if send.computing is not None]
        if computing:  # in the middle of a forward pass the producer's engine does nothing else
            steppable = []
            events += [(14, lambda: self.producer.end_computing(computing[0]))]
        elif self._waiting_sends and not self.producer.frozen:
            events.append((12, self._admit_send))
        if self._waiting_receives and not self.consumer.frozen:
            events.append((12, self._admit_receive))
        if steppable:
            events += [(14, lambda: self._step(self.pick(steppable)))]
            events += [(1, lambda: self._preempt(self.pick(steppable)))]
            events += [(1, lambda: self.producer.abandon_send(self.pick(steppable)))]
        waiting = [receive for receive in self.consumer.receives.values() if not receive.over]
        if waiting and not self.consumer.frozen:
            events.append((1, lambda: self._abort(self.pick(waiting))))
        if world.network:
            events += [(10, self._deliver_all), (10, self._deliver_one), (2, self._deliver_twice), (2, self._lose)]
        if self._seen:
            events += [(1, self._replay), (1, self._forge)]
        if world.moves():
            events += [(10, lambda: world.complete(self.pick(world.moves())))]
            events += [(1, lambda: world.complete(self.pick(world.moves()), failed=True))]
        return events

    # ── requests ──

    def open_sends(self) -> list[Send]:
        return [send for send in self.producer.sends.values() if not send.ended]

    def _a_request(self) -> None:
        self._count += 1
        length = self.pick([1, 3, 4, 5, 9, 16, 22])
        tokens = [self._count * 100 + index for index in range(length)]
        local = min(self.pick([0, 0, 4, 12]), (length - 1) // 4 * 4)
        name, transfer = f"r{self._count}", f"t{self._count}"
        what = self.pick(["right"] * 8 + ["other tokens", "no producer"])
        when_idle = self.pick([False, False, True])
        self._waiting_receives.append(Receive(name, transfer, tokens, local, [], when_idle))
        if what != "no producer":
            theirs = tokens if what == "right" else [7, *tokens[1:]]
            self._waiting_sends.append(Send(name, transfer, theirs, self.consumer.address, [], when_idle=when_idle))

    def _admit_send(self) -> None:
        send = self.pick(self._waiting_sends)
        self._waiting_sends.remove(send)
        self.producer.start_send(send)

    def _admit_receive(self) -> None:
        receive = self.pick(self._waiting_receives)
        self._waiting_receives.remove(receive)
        self.consumer.start_receive(receive, self.producer.address)

    def _step(self, send: Send) -> None:
        if not send.blocks:
            self.producer.plan(send)
        if send.computed < len(send.tokens):
            count = self.pick([1, 5, 8, 30])
            if self.pick([True, False]):
                self.producer.begin_computing(send, count)
                self.producer.tell_of_first_layer(send)
            else:
                self.producer.compute(send, count)
        else:
            self.producer.finish_send(send)

    def _preempt(self, send: Send) -> None:
        if send.blocks:
            self.producer.preempt(send)

    def _abort(self, receive: Receive) -> None:
        self.consumer.endpoint.execute(CancelReceive(receive.request_id))

    # ── the network ──

    def _deliver_all(self) -> None:
        self._seen += self.world.network
        self.world.deliver_all()

    def _deliver_one(self, *, keep: bool = False) -> None:
        index = self._choose(len(self.world.network))
        self._seen.append(self.world.network[index])
        self.world.deliver(index, keep=keep)

    def _deliver_twice(self) -> None:
        self._deliver_one(keep=True)

    def _lose(self) -> None:
        self.world.network.pop(self._choose(len(self.world.network)))

    def _replay(self) -> None:
        self.world.network.append(self.pick(self._seen[-40:]))

    def _forge(self) -> None:
        """Sends a message that a sender without knowledge of a request's tokens could forge."""
        name, epoch = self.pick([("p", 11), ("p", 12), ("c", 22), ("x", 33)])
        transfer = f"t{self.pick([1, 2, 3, 4])}"

        def envelope(to: int) -> Envelope:
            return Envelope(name, epoch, to, "tcp://x")

        self.world.network.append(
            self.pick(
                [
                    ("tcp://c", HandoffNotice(envelope(22), transfer, 9, b"x" * 32, 5, 64, 1, [[1]])),
                    ("tcp://p", RegisterDestination(envelope(11), 5, transfer, 9, b"x" * 32, [0], [[1, 2]])),
                    ("tcp://p", RegisterDestination(envelope(11), 5, transfer, -4, b"", [-9, 3], [[-1], [900]])),
                    ("tcp://c", TransferClosed(envelope(21), transfer, "forged", True)),
                    ("tcp://p", HandoffAccepted(envelope(12), transfer)),
                    ("tcp://c", Refusal(envelope(22), "", RefusalCode.WRONG_EPOCH, "forged", 11)),
                    ("tcp://p", Refusal(envelope(11), "", RefusalCode.WRONG_EPOCH, "forged", 22)),
                ]
            )
        )

    # ── time ──

    def _time_passes(self) -> None:
        self.world.advance(self.pick([0.05, 0.3, 0.6]))

    def _much_time_passes(self) -> None:
        self.world.advance(self.pick([1.5, 4.0, 25.0]))

    def _freeze_or_thaw(self) -> None:
        node = self.pick([self.producer, self.consumer])
        node.frozen = not node.frozen

    def _links_stall_or_go_on(self) -> None:
        self.world.stalled = not self.world.stalled

    def _address_refuses_or_accepts(self) -> None:
        """An address begins or stops to refuse connections, as with a firewall; the nodes and their other links still work."""
        self.world.closed_addresses ^= {self.pick(["tcp://p", "tcp://c"])}

    # ── the end ──

    def end(self) -> None:
        """With a healthy network, every transfer must end and every block come back."""
        self.producer.frozen = self.consumer.frozen = False
        self.world.stalled = False
        self.world.closed_addresses.clear()
        self.world.move_s = lambda: 0.05
        self.world.corrupts = lambda: False
        if self.world.device_does is not None:
            self.world.device_does = lambda: 100
            self.producer.wait_for_device()
        for send in self.open_sends():
            if send.computing is not None:
                self.producer.end_computing(send)
            self.producer.abandon_send(send)
        self.world.settle(SETTINGS.timeout_s + SETTINGS.lease_s + 2)
        for receive in self.consumer.receives.values():
            assert receive.over, f"{receive.request_id} hangs"
        for node in self.world.nodes.values():
            assert not node.transport.moves
            assert node.endpoint.is_idle, node.name
            assert len(node.free) == len(node.memory) - 1, f"{node.name} leaked blocks"
            assert node.recorder.snapshot(0).in_progress == 0
        outcomes = self.consumer.recorder.snapshot(0).outcomes
        assert sum(outcomes.values()) == len(self.consumer.receives)


def check(direction: Direction, examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    @given(
        skew=st.sampled_from([0.0, -500.0, 12345.6]),
        block_sizes=st.sampled_from([(4, 4), (4, 8), (8, 4)]),
        moves_can_be_taken_back=st.booleans(),
        late_device=st.one_of(st.none(), st.integers(0, 1 << 30)),
        choices=st.lists(st.integers(0, 1 << 30), min_size=40, max_size=160),
    )
    def histories(
        skew: float,
        block_sizes: tuple[int, int],
        moves_can_be_taken_back: bool,
        late_device: int | None,
        choices: list[int],
    ) -> None:
        drawn = iter(choices)
        history = History(
            direction,
            skew,
            block_sizes,
            moves_can_be_taken_back,
            random.Random(late_device) if late_device is not None else None,
            lambda options: next(drawn) % options,
        )
        try:
            while True:
                history.happen()
        except StopIteration:
            history.end()

    histories()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_few_histories(direction: Direction) -> None:
    check(direction, examples=20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("direction", list(Direction))
def test_every_transfer_ends_once_and_right_whatever_happens(direction: Direction) -> None:
    """Slow: histories of up to a hundred events each."""
    check(direction, examples=60 * int(os.environ.get("TANDEM_EXAMPLES", "1")))
