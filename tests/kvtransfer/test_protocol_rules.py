"""Each rule of the protocol alone, with a network and a clock that the test controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
from kv_fake_network import BLOCK_BYTES, SETTINGS, Node, Receive, Send, World, first_token_of

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import Handoff, TransferStats
from tandem.kvtransfer.config import ChecksumPolicy
from tandem.kvtransfer.protocol.cache_map import Mapping
from tandem.kvtransfer.protocol.commands import (
    AbandonSend,
    AnnounceSend,
    BeginGeneration,
    BeginReceive,
    CallBackSend,
    CancelReceive,
    DeclineTransfer,
    FinishSend,
    FoundWrong,
    PreemptedRequests,
    VoidSend,
)
from tandem.kvtransfer.protocol.halves import token_hash
from tandem.kvtransfer.protocol.receiving import IncomingTransfer
from tandem.kvtransfer.protocol.transport import Direction, Operation
from tandem.kvtransfer.sources import ASK_S
from tandem.wire.handoff import (
    Envelope,
    HandoffAccepted,
    HandoffNotice,
    Hello,
    KVArrived,
    ProcessIdentity,
    Refusal,
    RegisterDestination,
    RenewLease,
    Welcome,
)
from tandem.wire.nodes import PeerAddress
from tandem.wire.versions import KV_VERSION, REACH, WIRE_VERSION

TOKENS = list(range(50, 72))  # five full blocks and half of one


class Pair:
    def __init__(
        self,
        direction: Direction = Direction.PUSH,
        consumers_cache: dict[str, object] | None = None,
        checksum_policy: ChecksumPolicy = ChecksumPolicy.ALL,
    ) -> None:
        self.world = World(direction, checksum_policy)
        self.producer: Node = self.world.add("p", 11)
        self.consumer: Node = self.world.add("c", 22, skew=-700.0, cache=consumers_cache)

    def receive(
        self, tokens: list[int] = TOKENS, local: int = 0, name: str = "r1", *, when_idle: bool = False
    ) -> Receive:
        receive = Receive(name, f"t-{name}", tokens, local, [], when_idle)
        self.consumer.start_receive(receive, self.producer.address)
        return receive

    def send(self, tokens: list[int] = TOKENS, name: str = "r1", *, when_idle: bool = False) -> Send:
        send = Send(name, f"t-{name}", tokens, self.consumer.address, [], when_idle=when_idle)
        self.producer.start_send(send)
        return send

    def begin(self, tokens: list[int] = TOKENS, name: str = "r1", *, when_idle: bool = False) -> tuple[Receive, Send]:
        receive = self.receive(tokens, name=name, when_idle=when_idle)
        send = self.send(tokens, name, when_idle=when_idle)
        self.world.deliver_all()
        return receive, send

    def served(self, name: str = "r1") -> None:
        receive, send = self.receive(name=name), self.send(name=name)
        self.complete(send, 0.5)
        assert receive.finished

    def stats(self) -> tuple[TransferStats, TransferStats]:
        return self.producer.recorder.snapshot(0), self.consumer.recorder.snapshot(0)

    def complete(self, send: Send, settle_s: float | None = None) -> None:
        """Computes what is left of the prompt, and ends the request."""
        self.producer.compute(send, len(send.tokens))
        self.producer.finish_send(send)
        if settle_s is not None:
            self.world.settle(settle_s)

    def lose(self, kind: type, count: int = 1) -> None:
        for _ in range(count):
            index = next(index for index, (_, message) in enumerate(self.world.network) if isinstance(message, kind))
            self.world.network.pop(index)

    def move_everything(self) -> None:
        self.world.pump()
        while self.world.moves():
            for move in self.world.moves():
                self.world.complete(move)
            self.world.pump()

    def on_the_way(self, kind: type) -> list[object]:
        return [message for _, message in self.world.network if isinstance(message, kind)]

    def outcomes(self) -> tuple[dict[str, int], dict[str, int]]:
        return tuple(node.recorder.snapshot(0).outcomes for node in (self.producer, self.consumer))  # type: ignore[return-value]

    def refused(self, node: Node) -> dict[str, int]:
        return node.recorder.snapshot(0).refused

    def nothing_is_left(self) -> bool:
        self.world.settle(0.5)
        return all(
            node.endpoint.is_idle and len(node.free) == len(node.memory) - 1 and not node.transport.moves
            for node in (self.producer, self.consumer)
        )


def in_flight_write(pair: Pair) -> tuple[Receive, Send]:
    """A transfer with one write in flight and more to come."""
    receive = pair.receive()
    send = pair.send()
    pair.world.deliver_all()
    pair.producer.compute(send, 8)
    pair.world.pump()
    assert len(pair.world.moves()) == 1
    return receive, send


def taken_before_it_completes(pair: Pair, send: Send) -> float:
    """The engine takes the blocks of a write, and the write completes. Returns when the engine took them."""
    at = pair.producer.clock()
    pair.world.now += 0.01
    for block in send.blocks:
        pair.producer.memory.scribble(block)
    pair.world.complete(pair.world.moves()[0])
    return at


def hear_of_preemption(pair: Pair, send: Send, at: float) -> None:
    pair.producer.free += send.blocks
    send.blocks, send.computed = [], 0
    pair.producer.endpoint.execute(PreemptedRequests(["r1"], at))


@pytest.fixture(params=list(Direction))
def direction(request: pytest.FixtureRequest) -> Direction:
    return Direction(request.param)


@pytest.fixture
def pair(direction: Direction) -> Pair:
    return Pair(direction)


@pytest.fixture
def push() -> Pair:
    return Pair()


@pytest.fixture
def pull() -> Pair:
    return Pair(Direction.PULL)


# ── waiting is not failing, and unwanted requests are not computed ──


def test_the_time_that_a_transfer_may_take_begins_when_its_prompt_leaves_the_line(pair: Pair) -> None:
    pair.producer.endpoint.execute(AnnounceSend("r1", "t-r1"))
    receive = pair.receive()
    pair.world.settle(3 * SETTINGS.timeout_s)
    assert receive.failed is None, "its prompt waits in a healthy node's line"
    send = pair.send()
    pair.world.settle(SETTINGS.timeout_s / 2)
    pair.complete(send, 0.5)
    assert receive.finished
    assert pair.nothing_is_left()


def test_a_prompt_that_is_being_computed_for_too_long_is_not_waited_for(pair: Pair) -> None:
    pair.producer.endpoint.execute(AnnounceSend("r1", "t-r1"))
    receive = pair.receive()
    pair.world.settle(SETTINGS.timeout_s)
    pair.send()
    pair.world.settle(SETTINGS.timeout_s + 2 * SETTINGS.renew_s)
    assert receive.failed is not None
    assert pair.producer.unwanted == ["r1"]


@pytest.mark.parametrize("when", ["before its request", "in line", "while it is computed"])
def test_a_prompt_that_its_consumer_gave_up_is_not_computed_to_its_end(pair: Pair, when: str) -> None:
    pair.receive()
    if when != "before its request":
        pair.producer.endpoint.execute(AnnounceSend("r1", "t-r1"))
    pair.world.settle(0.5)
    send = pair.send() if when == "while it is computed" else None
    if send is not None:
        pair.producer.compute(send, 8)
    pair.world.settle(0.1)
    pair.consumer.endpoint.execute(CancelReceive("r1"))
    pair.world.settle(0.5)
    if when == "before its request":
        assert pair.producer.unwanted == []
        pair.producer.endpoint.execute(AnnounceSend("r1", "t-r1"))
    assert pair.producer.unwanted == ["r1"]


def test_a_prompt_that_was_handed_over_was_wanted(pair: Pair) -> None:
    pair.served()
    assert pair.producer.unwanted == []


# ── transfers that succeed ──


@pytest.mark.parametrize("registered", ["before", "while", "after"])
def test_the_registration_may_come_before_during_and_after_the_prompt(pair: Pair, registered: str) -> None:
    receive = pair.receive() if registered == "before" else None
    pair.world.deliver_all()
    send = pair.send()
    pair.producer.compute(send, 8)
    pair.world.pump()
    if registered == "while":
        receive = pair.receive()
        pair.world.deliver_all()
    pair.complete(send)
    if registered == "after":
        receive = pair.receive()
    pair.world.settle(0.5)
    assert receive is not None
    assert receive.finished == Handoff(first_token_of(TOKENS), len(TOKENS))
    assert pair.outcomes() == ({"sent": 1}, {"received": 1})
    stats = pair.stats()[0]
    assert stats.blocks_freed == {"sent": 6}
    [record] = stats.recent
    assert (record.request_id, record.outcome) == ("r1", "sent")
    assert (record.num_bytes, record.blocks) == (6 * BLOCK_BYTES, 6)
    assert record.waits["handover"] > 0
    assert pair.nothing_is_left()


def test_only_what_the_consumer_lacks_is_moved(pair: Pair) -> None:
    receive, send = pair.receive(local=16), pair.send()
    pair.complete(send, 0.5)
    assert receive.finished
    assert [pair.stats()[0].blocks_sent, pair.stats()[1].blocks_received] == [2, 2]


def test_finished_blocks_are_written_while_the_prompt_is_still_being_computed(push: Pair) -> None:
    receive, send = push.begin()
    push.producer.compute(send, 9)
    push.world.settle(0.1)
    assert push.stats()[0].blocks_sent == 2  # the third is not full
    push.complete(send, 0.1)
    assert receive.finished
    stats = push.stats()[0]
    assert stats.bytes_overlapped * 3 == stats.bytes_sent


def test_the_end_of_a_chunk_is_not_taken_for_that_of_the_next_one(push: Pair) -> None:
    """The device ends both between the look at the first chunk and the one at the next chunk's first layer."""
    receive, send = push.begin()
    steps = iter([0, 2, 0])
    push.world.device_does = lambda: next(steps, 1)
    push.producer.begin_computing(send, 9)
    push.producer.wait_for_device()
    push.producer.end_computing(send)  # looked at: not done
    push.producer.begin_computing(send, len(TOKENS))
    push.producer.tell_of_first_layer(send)  # looked at: both are done
    push.move_everything()
    assert push.stats()[0].blocks_sent == 2
    push.producer.end_computing(send)
    push.producer.finish_send(send)
    push.world.settle(0.5)
    assert receive.finished
    assert not push.producer.line


@pytest.mark.parametrize("arrived", [True, False])
def test_a_block_that_was_given_up_while_it_was_read_makes_the_transfer_worthless(push: Pair, arrived: bool) -> None:
    """As a window that moves on does, where the consumer's larger block begins before it."""
    receive, send = push.begin()
    push.producer.compute(send, len(TOKENS))
    push.world.pump()
    if arrived:
        push.move_everything()
    assert bool(push.world.moves()) is not arrived
    given_up, kept = send.blocks[0], [0, *send.blocks[1:]]
    push.producer.memory.scribble(given_up)
    send.ended = send.kept = True
    push.producer.endpoint.execute(FinishSend("r1", first_token_of(TOKENS), [kept]))
    push.world.settle(1.0)
    assert receive.failed is not None
    assert push.outcomes() == ({"mismatched": 1}, {"closed_by_peer": 1})


def test_the_handshake_is_made_once(pair: Pair) -> None:
    for name in ("r1", "r2", "r3"):
        pair.receive(name=name)
        pair.world.now += 0.125  # before the answer, if there is a question
        send = pair.send(name=name)
        pair.complete(send, 0.2)
    assert pair.outcomes() == ({"sent": 3}, {"received": 3})
    received = pair.stats()[1].recent
    assert [record.waits["handshake"] for record in received] == [0.125, 0.0, 0.0]


def test_a_registration_after_a_long_silence_gets_a_fresh_stamp_first(pair: Pair) -> None:
    pair.receive()
    send = pair.send()
    pair.complete(send, 0.2)
    pair.world.now += 1000.0
    pair.world.advance(SETTINGS.renew_s)
    second = pair.receive(name="r2")
    assert pair.on_the_way(RenewLease)
    assert not pair.on_the_way(RegisterDestination)
    send = pair.send(name="r2")
    pair.complete(send, 0.2)
    assert second.finished


def test_a_registration_that_is_lost_for_long_gets_a_fresh_stamp_before_it_is_sent_again(pair: Pair) -> None:
    receive, send = pair.receive(), pair.send()
    pair.world.deliver()  # Hello
    pair.world.deliver()  # Welcome
    asked_for_s, until = 1.0, pair.world.now + SETTINGS.lease_s / 2 + 1.0
    asked: list[object] = []
    while pair.world.now < until:
        pair.world.network.clear()
        pair.world.advance(SETTINGS.tick_s)
        asked += pair.on_the_way(RenewLease)
    assert 2 < len(asked) <= asked_for_s / SETTINGS.retry_s + 1, "it is asked for again and again, and not all the time"
    assert not pair.on_the_way(RegisterDestination)
    pair.complete(send, 0.5)
    assert receive.finished


def test_a_long_prompt_keeps_its_lease(pair: Pair) -> None:
    receive, send = pair.receive(), pair.send()
    pair.world.settle(4 * SETTINGS.lease_s)
    pair.complete(send, 0.2)
    assert receive.finished
    assert pair.stats()[0].leases_expired == 0


# ── preemption ──


def test_what_completed_after_its_blocks_were_taken_does_not_count(push: Pair) -> None:
    receive, send = in_flight_write(push)
    # The transfer thread may see this order, and read the preemption from its queue only then.
    at = taken_before_it_completes(push, send)
    push.world.pump()
    push.world.now += 0.01
    hear_of_preemption(push, send, at)
    push.producer.plan(send)
    push.complete(send, 0.3)
    assert receive.finished


def test_what_had_arrived_before_a_preemption_is_not_written_again(push: Pair) -> None:
    receive, send = in_flight_write(push)
    push.world.settle(0.1)
    assert push.stats()[0].blocks_sent == 2
    push.world.now += 1.0
    push.producer.preempt(send)
    push.producer.plan(send)
    push.complete(send, 0.3)
    assert receive.finished
    assert push.stats()[0].blocks_sent == 6


# ── giving up ──


def _never_connected(pair: Pair) -> None:
    pair.receive()
    pair.world.network.clear()


def _registered(pair: Pair) -> None:
    pair.receive()
    pair.world.deliver_all()


def _prefilling(pair: Pair) -> None:
    send = pair.send()
    pair.receive()
    pair.world.deliver_all()
    pair.producer.compute(send, 8)
    pair.world.pump()


def _computed(pair: Pair) -> None:
    _prefilling(pair)
    pair.producer.compute(pair.producer.sends["r1"], 30)
    pair.producer.finish_send(pair.producer.sends["r1"])
    pair.world.pump()


PHASES = [_never_connected, _registered, _prefilling, _computed]


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_on_the_consumer_ends_both_sides(pair: Pair, phase: Callable[[Pair], None]) -> None:
    phase(pair)
    pair.consumer.endpoint.execute(CancelReceive("r1"))
    pair.world.settle(1.0)
    assert pair.consumer.receives["r1"].failed
    assert pair.outcomes()[1] == {"aborted": 1}
    if phase is _prefilling:
        pair.producer.finish_send(pair.producer.sends["r1"])
    pair.world.settle(SETTINGS.silent_s + 1)
    if phase in (_prefilling, _computed):
        assert pair.outcomes()[0] == {"cancelled": 1}
    if phase is _computed:
        assert pair.stats()[0].blocks_freed == {"cancelled": 6}
    assert pair.nothing_is_left()


def test_the_blocks_of_an_aborted_request_wait_until_nothing_writes_to_them(push: Pair) -> None:
    """The engine has no use for them before, so they are never reported as unsafe."""
    push.world.stalled = True
    receive, _ = in_flight_write(push)
    push.producer.frozen = True
    push.consumer.endpoint.execute(CancelReceive("r1"))
    push.world.advance(SETTINGS.lease_s - 0.5)
    assert not receive.over
    push.world.advance(2 * SETTINGS.lease_s)  # the way that its writes take is closed
    assert receive.over
    assert not receive.quarantined
    assert push.stats()[1].quarantined_blocks == 0


@pytest.mark.parametrize("phase", PHASES)
def test_a_consumer_that_shuts_down_gives_everything_up_and_waits_for_what_moves(
    pair: Pair, phase: Callable[[Pair], None]
) -> None:
    phase(pair)
    pair.world.deliver_all()
    moves, is_told = bool(pair.world.moves()), phase is not _never_connected
    pushes = pair.world.direction is Direction.PUSH
    assert pair.consumer.endpoint.shutdown() is not (moves or (pushes and is_told))
    pair.world.settle(0.5)
    assert pair.consumer.endpoint.shutdown()
    assert pair.consumer.receives["r1"].reason == "the node shuts down"
    assert pair.outcomes()[1] == {"shutdown": 1}


@pytest.mark.parametrize("phase", [_prefilling, _registered])
def test_an_abort_on_the_producer_fails_the_consumer_at_once(pair: Pair, phase: Callable[[Pair], None]) -> None:
    phase(pair)
    if phase is _registered:
        pair.producer.endpoint.execute(AbandonSend("r1", "t-r1", kept=False))
    else:
        pair.producer.abandon_send(pair.producer.sends["r1"])
    pair.world.settle(0.3)
    failed = pair.consumer.receives["r1"].failed
    assert failed is not None
    assert "ended before its prompt was computed" in failed.reason
    assert pair.nothing_is_left()


def test_an_abort_before_anything_was_asked_frees_the_producer(pair: Pair) -> None:
    send = pair.send()
    pair.complete(send)
    pair.consumer.endpoint.execute(DeclineTransfer("t-r1", pair.producer.address))
    pair.world.settle(0.1)
    assert send.reported == 1
    assert pair.nothing_is_left()


def test_what_can_be_taken_back_is_not_waited_for(pair: Pair) -> None:
    pair.world.moves_can_be_taken_back = True
    _computed(pair)
    pair.world.deliver_all()
    assert pair.world.moves()
    pair.consumer.endpoint.execute(CancelReceive("r1"))
    pair.world.deliver_all()
    assert pair.consumer.receives["r1"].failed
    assert pair.producer.sends["r1"].reported == 1
    assert not pair.world.moves()
    assert pair.nothing_is_left()


def test_a_failed_transfer_says_what_is_right_all_the_same(pair: Pair) -> None:
    receive = pair.receive(local=12)
    pair.consumer.endpoint.execute(CancelReceive("r1"))
    pair.world.settle(1.0)
    assert receive.valid_tokens == 12


DISTRUSTS = "p distrusts its own cache, from which KV was received"


def test_a_producer_confirms_that_its_kv_was_wrong_once_no_disk_would_bring_it_back(pair: Pair) -> None:
    """If it ends before, its next process finds the same KV, and is told again."""
    is_on_disk = False
    pair.producer.sources.add_tier(lambda: not is_on_disk)
    pair.served()
    pair.consumer.endpoint.execute(FoundWrong(pair.producer.address))
    pair.world.settle(1.0)
    assert len(pair.producer.distrusted) == 1
    pair.producer.endpoint.execute(BeginGeneration())
    accused = pair.consumer.endpoint.consumer.generations.accused
    pair.world.settle(2 * ASK_S)
    assert accused
    is_on_disk = True
    pair.world.settle(2 * ASK_S)
    assert not accused
    assert len(pair.producer.distrusted) == 1


def test_kv_that_is_wrong_again_much_later_is_distrusted_again(push: Pair) -> None:
    """The first time the producer heard of it late, and so remembers it for longer than the consumer did."""
    push.served()
    push.consumer.endpoint.execute(FoundWrong(push.producer.address))
    push.lose(RenewLease)
    push.world.settle(ASK_S + 1.0)
    push.producer.endpoint.execute(BeginGeneration())
    push.world.settle(ASK_S + 1.0)
    assert len(push.producer.distrusted) == 1
    push.world.now += SETTINGS.keep_link_s - ASK_S - 5.0
    push.consumer.endpoint.execute(FoundWrong(push.producer.address))
    push.world.settle(ASK_S + 1.0)
    assert len(push.producer.distrusted) == 2


def test_a_consumer_whose_link_is_gone_hears_at_once_that_its_kv_was_wrong(push: Pair) -> None:
    """A node that is restarted right after a reset answers no question any more."""
    receive, send = push.receive(), push.send()
    push.world.deliver_all()
    push.producer.compute(send, 22)
    push.producer.finish_send(send)
    push.world.settle(1.0)
    assert receive.finished
    push.receive(name="r2")
    later = push.send(name="r2")
    push.world.deliver_all()
    push.producer.compute(later, 8)
    push.world.pump()
    push.world.complete(push.world.moves()[0], failed=True)
    push.producer.abandon_send(later)
    push.world.settle(1.0)
    push.producer.endpoint.execute(BeginGeneration())
    push.world.deliver_all()
    assert push.consumer.distrusted == [DISTRUSTS]


def test_a_consumer_is_told_of_a_new_generation_until_it_has_heard(pair: Pair) -> None:
    """Also by a node that ends before the consumer asks it again."""
    pair.served()
    pair.producer.endpoint.execute(BeginGeneration())
    pair.world.network.clear()  # what it has just said is lost
    assert not pair.producer.endpoint.shutdown()
    pair.world.settle(1.0)
    assert pair.consumer.distrusted == [DISTRUSTS]
    assert pair.producer.endpoint.is_idle
    assert pair.producer.endpoint.shutdown()


def test_a_consumer_that_registered_before_a_generation_began_is_told_of_its_end(pair: Pair) -> None:
    """Its prompt was in line then, so what it has is of the later generation."""
    receive = pair.receive()
    pair.world.deliver_all()
    pair.producer.endpoint.execute(BeginGeneration())
    pair.world.settle(1.0)
    pair.complete(pair.send(), 0.5)
    assert receive.finished
    assert not pair.consumer.distrusted
    pair.producer.endpoint.execute(BeginGeneration())
    pair.world.deliver_all()
    assert pair.consumer.distrusted == [DISTRUSTS]


def test_nothing_is_right_of_a_prompt_whose_kv_turned_out_wrong(push: Pair) -> None:
    """Its first blocks had arrived and were told of before that was known."""
    receive, send = push.begin()
    push.producer.compute(send, 16)
    push.world.settle(5.0)
    assert not receive.finished
    push.producer.endpoint.execute(VoidSend("r1"))
    push.producer.abandon_send(send)
    push.world.settle(1.0)
    assert receive.valid_tokens == 0
    assert push.nothing_is_left()


def test_a_prompt_whose_kv_turned_out_wrong_is_given_up_where_it_was_accepted(push: Pair) -> None:
    """The acceptance and the news cross each other."""
    receive, send = push.begin()
    push.complete(send)
    push.move_everything()
    while not receive.finished:
        push.world.deliver()
    push.lose(HandoffAccepted)
    push.producer.endpoint.execute(VoidSend("r1"))
    push.world.deliver_all()
    assert push.consumer.distrusted == ["p says that KV is wrong which a request here has"]
    assert push.nothing_is_left()


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_failed_transfer_left_is_given_up_when_its_prompts_kv_turns_out_wrong(push: Pair, is_told: bool) -> None:
    """Whether its producer has told of the transfer's end before that, or the consumer did not wait for it."""
    receive, send = some_has_arrived(push)
    if is_told:
        push.consumer.endpoint.execute(CancelReceive("r1"))
        push.world.settle(1.0)
    else:
        push.producer.compute(send, 4)
        push.world.pump()
        push.producer.frozen = True
        push.world.advance(10 * SETTINGS.lease_s)
        push.producer.frozen = False
    assert receive.valid_tokens
    push.producer.endpoint.execute(VoidSend("r1"))
    push.producer.abandon_send(send)
    push.world.settle(1.0)
    assert push.consumer.distrusted == ["p says that KV is wrong which a request here has"]
    assert push.nothing_is_left()


def some_has_arrived(push: Pair) -> tuple[Receive, Send]:
    """A transfer of whose blocks the consumer was told that some are there."""
    receive, send = push.begin()
    for _ in range(2):
        push.producer.compute(send, 8)
        push.world.settle(0.5)
    return receive, send


def test_what_a_producer_distrusts_is_not_used_if_it_ends_before_it_closes_the_transfer(push: Pair) -> None:
    """As a node does that fails its check: it says so, and ends."""
    receive, send = some_has_arrived(push)
    push.producer.compute(send, 4)
    push.world.pump()
    assert push.world.moves()
    push.producer.endpoint.execute(BeginGeneration())
    push.world.deliver_all()
    assert push.consumer.distrusted
    push.world.kill("p")
    push.world.settle(SETTINGS.lease_s + 2.0)
    assert receive.valid_tokens == 0


def test_what_a_failed_transfer_left_is_given_up_when_its_producer_distrusts_it(push: Pair) -> None:
    """Also if the consumer has begun a new generation of its own cache meanwhile."""
    receive, send = some_has_arrived(push)
    push.producer.compute(send, len(TOKENS))
    push.world.settle(0.5)
    push.consumer.endpoint.execute(BeginGeneration())
    push.consumer.endpoint.execute(CancelReceive("r1"))
    push.world.settle(1.0)
    assert receive.valid_tokens
    push.producer.endpoint.execute(BeginGeneration())
    push.world.settle(ASK_S + 1.0)
    assert push.consumer.distrusted


def test_blocks_of_recurrent_states_are_never_safe_while_a_peer_may_write() -> None:
    """They stand at the table's beginning, and hold what comes after the last token."""
    command = BeginReceive("r", "t", PeerAddress("p", 1, "tcp://p"), 43, 32, b"", [8, 0], [[23, 24, 25], [26]])
    receiving = IncomingTransfer(command, 0.0, 1.0)
    assert receiving.unsafe_blocks(4, 32, has_states=True) == {23, 24, 25, 26}
    assert receiving.unsafe_blocks(4, 40, has_states=True) == {25, 26}
    assert receiving.unsafe_blocks(4, 40, has_states=False) == {25}


# ── leases ──


def test_the_producer_frees_what_nobody_renews(pair: Pair) -> None:
    _computed(pair)
    pair.move_everything()
    pair.consumer.frozen = True
    send = pair.producer.sends["r1"]
    pair.world.advance(SETTINGS.lease_s - 0.5)
    assert send.reported == 0
    pair.world.advance(1.0)
    assert send.reported == 1
    assert pair.outcomes()[0] == {"lease_expired": 1}
    assert pair.stats()[0].leases_expired == 1
    pair.consumer.frozen = False
    pair.world.settle(SETTINGS.lease_s + 1)
    assert pair.consumer.receives["r1"].over
    assert pair.nothing_is_left()


def test_the_producer_frees_what_nobody_ever_registers(pair: Pair) -> None:
    send = pair.send()
    pair.complete(send)
    pair.world.advance(SETTINGS.lease_s + 0.1)
    assert send.reported == 1
    assert pair.outcomes()[0] == {"lease_expired": 1}
    assert pair.stats()[0].blocks_freed == {"lease_ended": 6}


def test_what_no_consumer_has_registered_is_given_back_when_it_is_called_back(pair: Pair) -> None:
    held = pair.send(name="r1")
    pair.complete(held)
    receive, taken = pair.receive(name="r2"), pair.send(name="r2")
    pair.world.deliver_all()
    for name in ("r1", "r2", "unknown"):
        pair.producer.endpoint.execute(CallBackSend(name))
    assert held.reported == 1
    pair.complete(taken, 0.5)
    assert receive.finished, "its consumer was ready for it"
    late = pair.receive(name="r1")
    pair.world.settle(0.5)
    assert late.failed is not None, "the consumer computes it"
    assert pair.outcomes()[0] == {"aborted": 1, "sent": 1}
    assert pair.nothing_is_left()


@pytest.mark.parametrize("starved", ["in line", "preempted"])
def test_prompts_of_one_consumer_do_not_wait_for_each_others_blocks(pair: Pair, starved: str) -> None:
    """Each node has room for one of two requests, and they began with different ones."""
    pair.receive(name="r1")
    if starved == "in line":
        pair.producer.endpoint.execute(AnnounceSend("r1", "t-r1"))
    else:
        pair.producer.preempt(pair.send(name="r1"))
    held = pair.send(name="r2")
    pair.complete(held, SETTINGS.patience_s - 0.3)
    assert held.reported == 0, "the consumer may only be late"
    pair.world.settle(SETTINGS.patience_s)
    assert held.reported == 1
    if starved == "in line":
        pair.send(name="r1")
    else:
        pair.producer.plan(pair.producer.sends["r1"])
    pair.complete(pair.producer.sends["r1"], 0.5)
    assert pair.consumer.receives["r1"].finished
    late = pair.receive(name="r2")
    pair.world.settle(0.5)
    assert late.failed is not None, "the consumer computes it"
    assert pair.nothing_is_left()


def test_a_registration_without_a_request_is_kept_for_a_lease(pair: Pair) -> None:
    pair.receive()
    pair.world.deliver_all()
    pair.consumer.frozen = True
    pair.world.advance(SETTINGS.lease_s + 0.1)
    assert pair.producer.endpoint.is_idle
    assert pair.outcomes()[0] == {"lease_expired": 1}


def test_renewals_that_lay_in_a_queue_while_the_producer_was_stopped_renew_nothing(push: Pair) -> None:
    receive, send = push.receive(), push.send()
    push.world.settle(0.2)
    push.producer.frozen = True
    push.world.advance(SETTINGS.lease_s + SETTINGS.margin_s + 0.1)
    assert receive.failed is not None  # its blocks are another request's now
    assert push.on_the_way(RenewLease)
    push.producer.frozen = False
    push.producer.compute(send, 30)
    push.world.deliver_all()
    push.world.pump()
    assert not push.world.moves()
    push.producer.finish_send(send)
    assert push.nothing_is_left()


def test_a_silent_producer_fails_the_transfer_only_when_its_lease_has_ended(push: Pair) -> None:
    receive, _ = push.receive(), push.send()
    push.world.settle(0.2)
    push.producer.frozen = True
    push.world.advance(SETTINGS.lease_s - 0.5)
    assert receive.failed is None
    push.world.advance(1.0 + SETTINGS.margin_s)
    assert receive.failed is not None
    assert push.outcomes()[1] == {"peer_lost": 1}


def test_what_was_read_after_the_lease_had_ended_is_not_believed(pull: Pair) -> None:
    _computed(pull)
    pull.world.deliver_all()
    receive = pull.consumer.receives["r1"]
    assert pull.world.moves()
    pull.consumer.frozen = True
    pull.world.advance(SETTINGS.lease_s + 0.1)  # the producer's blocks are another request's now
    pull.consumer.frozen = False
    pull.move_everything()  # the consumer reads on before it looks at its messages
    pull.world.settle(1.0)
    assert receive.finished is None
    assert receive.failed is not None
    assert pull.nothing_is_left()


@pytest.mark.parametrize("move_s", [SETTINGS.margin_s / 4, SETTINGS.lease_s / 2, 3 * SETTINGS.lease_s])
@pytest.mark.parametrize("stood_still_s", [SETTINGS.lease_s / 2, SETTINGS.lease_s + 1.0])
@pytest.mark.parametrize("who", ["consumer", "producer", "both"])
def test_what_was_written_while_a_node_stood_still_lands_in_blocks_that_nothing_else_uses(
    push: Pair, stood_still_s: float, move_s: float, who: str
) -> None:
    """By TCP it is the consumer's own process that carries out what it finds in its sockets."""
    push.world.move_s = lambda: move_s
    receive, send = in_flight_write(push)
    stopped = {"consumer": [push.consumer], "producer": [push.producer]}.get(who, [push.consumer, push.producer])
    for node in stopped:
        node.frozen = True
    push.world.advance(stood_still_s)
    if push.producer not in stopped:
        push.producer.abandon_send(send)
    push.world.advance(SETTINGS.margin_s)
    for node in stopped:
        node.frozen = False
    if not send.ended:
        push.producer.abandon_send(send)
    until = push.world.now + 4 * SETTINGS.lease_s
    while push.world.now < until:  # World sees where they land
        push.world.advance(SETTINGS.tick_s)
        push.world.deliver_all()
    assert receive.failed is not None
    assert push.nothing_is_left()


def test_a_registration_that_was_doubled_and_comes_late_ends_nothing(pair: Pair) -> None:
    receive = pair.receive()
    pair.world.deliver()  # Hello
    pair.world.deliver()  # Welcome
    [late] = pair.on_the_way(RegisterDestination)
    pair.world.settle(SETTINGS.lease_s + 0.1)
    pair.world.network.append(("tcp://p", late))  # type: ignore[arg-type]
    pair.world.deliver_all()
    assert not receive.over
    send = pair.send()
    pair.complete(send, 0.2)
    assert receive.finished


# ── peers ──


def test_the_proven_end_of_a_producers_process_frees_its_blocks_before_its_lease_ends(pair: Pair) -> None:
    receive, _ = pair.receive(), pair.send()
    pair.world.settle(0.2)
    pair.world.kill("p")
    pair.world.advance(SETTINGS.renew_s + SETTINGS.silent_s + 2 * SETTINGS.margin_s + 0.2)
    assert "its process has ended" in receive.reason
    assert not receive.failed.unsafe_blocks
    assert pair.outcomes()[1] == {"peer_lost": 1}


def test_the_proven_end_of_a_consumers_process_frees_the_producers_blocks_before_the_lease_ends(pair: Pair) -> None:
    _computed(pair)
    pair.world.deliver_all()
    pair.move_everything()
    pair.world.kill("c")
    pair.world.advance(SETTINGS.silent_s + 0.5)
    assert pair.producer.sends["r1"].reported == 1
    assert pair.outcomes()[0] == {"peer_lost": 1}
    assert pair.stats()[0].blocks_freed == {"peer_lost": 6}


@pytest.mark.parametrize("victim", ["p", "c"])
def test_a_dead_peer_whose_end_nothing_proves_costs_a_lease(pair: Pair, victim: str) -> None:
    _computed(pair)
    pair.world.deliver_all()
    pair.move_everything()
    pair.world.kill(victim, proven=False)
    pair.world.advance(SETTINGS.lease_s + SETTINGS.renew_s)
    survivor = pair.consumer if victim == "p" else pair.producer
    pair.world.advance(SETTINGS.lease_s)
    assert len(survivor.free) == len(survivor.memory) - 1
    assert survivor.endpoint.is_idle


def test_a_producer_restarted_at_the_same_address_fails_the_transfer_at_once(pair: Pair) -> None:
    receive, _ = pair.receive(), pair.send()
    pair.world.settle(0.2)
    old = pair.producer
    reborn = pair.world.add("p", 12)
    pair.world.advance(SETTINGS.renew_s + 0.2)
    pair.world.deliver_all()
    assert "another incarnation" in receive.reason
    assert pair.refused(reborn)["wrong_epoch"] >= 1
    # Transfers with the new incarnation succeed at once.
    pair.producer = reborn
    second = pair.receive(name="r2")
    send = pair.send(name="r2")
    reborn.compute(send, 30)
    reborn.finish_send(send)
    pair.world.settle(0.5)
    assert second.finished
    assert old.recorder.snapshot(0).outcomes == {}


@pytest.mark.parametrize("has_something_to_receive", [True, False])
def test_a_consumer_restarted_at_the_same_address_frees_the_producer_when_its_lease_ends(
    pair: Pair, has_something_to_receive: bool
) -> None:
    _computed(pair)
    pair.move_everything()
    pair.world.network.clear()
    pair.consumer = pair.world.add("c", 23)
    if has_something_to_receive:
        pair.receive(name="r2")
    pair.world.deliver_all()
    assert pair.producer.sends["r1"].reported == 0
    pair.world.settle(SETTINGS.lease_s)
    assert pair.producer.sends["r1"].reported == 1
    assert pair.outcomes()[0] == {"lease_expired": 1}


# ── evidence ──


def test_a_refused_connection_frees_nothing(push: Pair) -> None:
    push.world.move_s = lambda: 10.0
    receive, _ = in_flight_write(push)
    push.world.closed_addresses.add("tcp://p")
    push.world.ways_can_be_closed = False
    push.world.advance(6.0)
    assert "refuses connections" in receive.reason
    assert receive.failed.unsafe_blocks
    assert push.stats()[1].quarantined_blocks == 6
    push.world.advance(6.0)  # the write lands, and World sees where
    assert receive.quarantined
    push.world.closed_addresses.clear()
    push.producer.abandon_send(push.producer.sends["r1"])
    push.world.settle(2 * SETTINGS.renew_s)
    assert not receive.quarantined
    assert push.nothing_is_left()


def test_ways_that_cannot_be_closed_now_are_closed_later(push: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise TransferError("NIXL: releasing descriptors")

    with monkeypatch.context() as patched:
        patched.setattr(push.consumer.transport, "close_earlier", fail)
        push.world.move_s = lambda: 1000.0
        receive, _ = in_flight_write(push)
        push.world.closed_addresses.add("tcp://p")
        push.producer.frozen = True
        push.world.advance(3 * SETTINGS.lease_s)
        assert receive.quarantined
    push.world.advance(2 * SETTINGS.lease_s)
    assert not receive.quarantined


@pytest.mark.parametrize("how", ["refuses", "does not answer"])
def test_a_request_does_not_wait_for_a_producer_that_cannot_be_reached(push: Pair, how: str) -> None:
    """The link exists already, so no handshake's deadline ends the wait."""
    push.served("r0")
    push.world.network.clear()
    (push.world.closed_addresses if how == "refuses" else push.world.cut_off).add("tcp://p")
    receive = push.receive()
    push.world.network.clear()
    push.world.advance(SETTINGS.probe_s + 0.2)
    assert how in receive.reason


def test_a_producer_that_is_starved_is_waited_for(push: Pair) -> None:
    """Its machine accepts connections for it."""
    push.served("r0")
    receive, send = push.receive(), push.send()
    push.producer.frozen = True
    push.world.settle_messages(SETTINGS.lease_s * 0.8)
    assert receive.failed is None
    push.producer.frozen = False
    push.complete(send, 0.5)
    assert receive.finished


def test_a_refusal_does_not_tell_the_epoch(pair: Pair) -> None:
    pair.world.network.append(("tcp://c", RenewLease(Envelope("x", 1, 0, "tcp://x"), 0, [])))
    pair.world.deliver()
    [(to, refused)] = pair.world.network
    assert to == "tcp://x"
    assert isinstance(refused, Refusal)
    assert "22" not in str(msgspec.to_builtins(refused))


def test_a_forged_hello_holds_no_consumer_for_dead(pair: Pair) -> None:
    receive, send = pair.begin()
    own = pair.consumer.geometry
    forged = Hello(Envelope("c", 99, 11, "tcp://x"), own.fingerprint, own.memory, ProcessIdentity("elsewhere", 1, 1, 1))
    pair.world.network.append(("tcp://p", forged))
    pair.world.deliver_all()
    pair.complete(send, 0.3)
    assert receive.finished
    pair.served("r2")


# ── slow writes ──


def test_a_request_does_not_wait_for_writes_that_stall(push: Pair) -> None:
    push.world.stalled = True
    receive, send = in_flight_write(push)
    push.producer.abandon_send(send)
    push.world.settle_messages(SETTINGS.timeout_s + 2 * SETTINGS.silent_s)
    assert receive.failed is not None
    assert receive.failed.unsafe_blocks
    assert len(push.consumer.free) == len(push.consumer.memory) - 1 - 6
    push.world.stalled = False
    assert push.nothing_is_left()


def test_a_transfer_that_waits_for_others_on_its_link_moves_when_they_have(push: Pair) -> None:
    """The sum of a link's writes is bounded. A write that finds the link full must be tried again, even if its prompt is computed and no
    further event follows."""
    push.world.stalled = True
    sent = []
    for number in range(3):  # of six blocks each; the link takes four
        receive, send = push.begin(name=f"r{number}")
        push.complete(send)
        push.world.pump()
        sent.append(receive)
    push.world.stalled = False
    push.world.settle(SETTINGS.lease_s / 2)
    assert all(receive.finished for receive in sent)


def test_kv_that_no_one_waits_for_moves_when_no_others_has_to(pair: Pair) -> None:
    """The line of a batch, of six blocks, is computed first. The link takes four at a time."""
    pair.world.stalled = True
    line, send = pair.begin(name="line", when_idle=True)
    pair.complete(send)
    request, send = pair.begin(name="request")
    pair.complete(send)
    expected = [*line.blocks[:4], *request.blocks, *line.blocks[4:]]
    moved: list[int] = []
    while len(moved) < len(expected):
        pair.world.settle_messages(0.001)
        pair.world.pump()
        move = pair.world.moves()[0]
        moved += dict.fromkeys(move.remote if move.operation is Operation.WRITE else move.local)
        pair.world.complete(move)
    assert moved == expected
    assert pair.nothing_is_left()
    assert request.finished
    assert line.finished


def test_a_way_is_closed_only_when_no_other_transfer_uses_it(push: Pair) -> None:
    """The blocks of a silent producer's transfer stay in quarantine until the others on the same way have ended; those lose nothing."""
    push.world.move_s = lambda: 1000.0
    receive, _ = in_flight_write(push)
    other = push.world.add("q", 13)
    second = Receive("r2", "t-r2", TOKENS, 0, [])
    push.consumer.start_receive(second, other.address)
    sent = Send("r2", "t-r2", TOKENS, push.consumer.address, [])
    other.start_send(sent)
    push.world.deliver_all()
    push.world.kill("p", proven=False)
    push.world.settle_messages(SETTINGS.silent_s + 3 * SETTINGS.lease_s)
    assert receive.quarantined
    assert push.consumer.transport.ways == [0, 1]
    push.world.move_s = lambda: 0.05
    other.compute(sent, 30)
    other.finish_send(sent)
    push.world.settle(0.5)
    assert second.finished
    assert not receive.quarantined
    assert push.consumer.transport.ways == [1]
    push.producer = other
    push.served("r3")
    assert push.nothing_is_left()


def test_a_producer_of_this_machine_that_is_stopped_keeps_its_blocks_until_it_goes_on(push: Pair) -> None:
    push.world.same_machine = True
    receive, send = in_flight_write(push)
    push.producer.frozen = True
    push.world.advance(10 * SETTINGS.lease_s)
    assert receive.quarantined
    push.producer.frozen = False
    push.producer.abandon_send(send)
    assert push.nothing_is_left()


def test_writes_that_the_receiver_can_refuse_are_not_waited_for(push: Pair) -> None:
    push.world.late_writes_are_refused = True
    receive, send = in_flight_write(push)
    push.consumer.endpoint.execute(CancelReceive("r1"))
    push.world.network.clear()
    push.world.stalled = True
    push.world.advance(SETTINGS.silent_s + 0.1)
    assert receive.failed
    assert not receive.failed.unsafe_blocks
    push.world.stalled = False
    push.producer.abandon_send(send)
    assert push.nothing_is_left()


def test_a_transfer_with_an_incarnation_known_to_be_dead_fails_at_once(pair: Pair) -> None:
    pair.receive()
    pair.world.settle(0.2)
    old = pair.producer.address
    pair.world.add("p", 12)
    pair.world.advance(SETTINGS.renew_s + 0.2)
    pair.world.deliver_all()
    late = Receive("r2", "t-r2", TOKENS, 0, [])
    pair.consumer.start_receive(late, old)
    assert late.failed


def test_a_request_that_names_an_earlier_incarnation_does_not_harm_the_one_that_runs(pair: Pair) -> None:
    """The request waited while the node was started again, or its router does not know of the restart yet."""
    late = Receive("r1", "t-r1", TOKENS, 0, [])
    earlier = pair.producer.address
    pair.world.add("p", 12)
    pair.producer = pair.world.nodes["p"]
    pair.served("r2")
    waiting = pair.receive(name="r3")
    pair.consumer.start_receive(late, earlier)
    pair.world.deliver_all()
    assert "another incarnation" in late.reason
    assert not waiting.over
    pair.served("r4")


def test_a_request_that_names_another_incarnation_does_not_free_what_the_earlier_may_still_write_to(push: Pair) -> None:
    """A node that its controller has lost is replaced, and may run all the same."""
    receive, send = in_flight_write(push)
    earlier = push.producer
    later = Node(push.world, "p2", 12, 0.0, Direction.PUSH)
    push.world.nodes["p2"] = later
    second = Receive("r2", "t-r2", TOKENS, 0, [])
    push.consumer.start_receive(second, PeerAddress("p", 12, "tcp://p2"))
    push.world.settle(0.2)  # World sees where the write lands
    assert not receive.over
    earlier.compute(send, 30)
    earlier.finish_send(send)
    push.world.settle(0.3)
    assert receive.finished


def test_nothing_is_kept_for_nodes_that_went_for_good(pair: Pair) -> None:
    """In a pool that grows and shrinks every node has a new name, so old names must be forgotten."""
    pull = pair.world.direction is Direction.PULL
    survivor = pair.consumer if pull else pair.producer
    for number in range(5):
        if pull:
            pair.producer = pair.world.add(f"p{number}", 100 + number)
        else:
            pair.consumer = pair.world.add(f"c{number}", 100 + number)
        pair.served(f"r{number}")
        assert len(survivor.transport.remotes) == min(1 + number, 3)
        pair.world.kill((pair.producer if pull else pair.consumer).name, proven=False)
        pair.world.now += SETTINGS.keep_link_s / 2 - 2 * SETTINGS.lease_s
        pair.world.advance(2 * SETTINGS.lease_s - 1)


def test_who_was_not_heard_of_for_long_is_served_when_it_comes_back(pair: Pair) -> None:
    first = (pair.producer, pair.consumer)
    pair.served("r1")
    pair.world.now += SETTINGS.keep_link_s + 1
    pair.producer, pair.consumer = (pair.world.add(*node) for node in (("p2", 33), ("c2", 44)))
    for producer, consumer in ((first[0], pair.consumer), (pair.producer, first[1])):
        pair.producer, pair.consumer = producer, consumer
        pair.served(f"r-{producer.name}")
    pair.producer, pair.consumer = first
    pair.served("r2")


@pytest.mark.parametrize("victim", ["p", "c"])
def test_nothing_is_said_to_the_dead_and_no_connection_with_them_is_kept(pair: Pair, victim: str) -> None:
    _computed(pair)
    pair.world.deliver_all()
    pair.move_everything()
    pair.world.kill(victim)
    pair.world.advance(SETTINGS.renew_s + SETTINGS.silent_s + 2 * SETTINGS.margin_s)
    assert f"tcp://{victim}" in pair.world.forgotten
    pair.world.advance(SETTINGS.lease_s)
    pair.world.network.clear()
    pair.world.advance(SETTINGS.lease_s)
    assert f"tcp://{victim}" not in {to for to, _ in pair.world.network}


@pytest.mark.parametrize("started_anew", ["p", "c"])
def test_the_connection_with_an_earlier_incarnation_is_not_kept(pair: Pair, started_anew: str) -> None:
    pair.served("r1")
    reborn = Node(pair.world, started_anew, 12, 0.0, pair.world.direction)
    reborn.identity = dataclasses.replace(reborn.identity, endpoint="tcp://elsewhere")
    pair.world.nodes["elsewhere"] = reborn
    if started_anew == "p":
        pair.consumer.start_receive(Receive("r2", "t-r2", TOKENS, 0, []), PeerAddress("p", 12, "tcp://elsewhere"))
    else:
        hello = Hello(reborn.identity.envelope(11), reborn.geometry.fingerprint, reborn.geometry.memory, reborn.process)
        pair.world.network.append(("tcp://p", hello))
        pair.world.deliver()
    assert pair.world.forgotten == [f"tcp://{started_anew}"]


@pytest.mark.parametrize(
    ("differing", "said"),
    [
        ({"kv_version": KV_VERSION + 1}, f"kv_version is {KV_VERSION} here and {KV_VERSION + 1} there"),
        ({"wire_version": WIRE_VERSION + REACH + 1}, f"it speaks version {WIRE_VERSION + REACH + 1} of"),
        ({"wire_version": WIRE_VERSION + REACH}, None),
    ],
)
def test_only_nodes_whose_versions_fit_move_kv(push: Pair, differing: dict[str, int], said: str | None) -> None:
    ours = push.consumer.geometry
    mapping = ours.mapping_to(msgspec.structs.replace(ours.fingerprint, **differing), ours.memory)
    assert isinstance(mapping, Mapping) if said is None else said in str(mapping)


def test_caches_that_differ_are_refused_on_both_sides_at_once(direction: Direction) -> None:
    pair = Pair(direction, consumers_cache={"dtype": "bfloat16", "num_layers": 30})
    receive = pair.receive()
    pair.world.deliver_all()
    assert "dtype is 'float32' here and 'bfloat16' there" in receive.reason
    assert "num_layers is 2 here and 30 there" in receive.failed.reason
    assert pair.outcomes()[1] == {"incompatible": 1}
    assert pair.refused(pair.producer) == {"incompatible": 1}


@pytest.mark.parametrize(
    "memory",
    [
        {"num_blocks": 1 << 40},
        {"num_blocks": 1},
        {"num_blocks": -5},
        {"base_address": -1},
        {"base_address": 1 << 63},
        {"device_id": -1},
        {"block_bytes": 0},
    ],
)
def test_memory_that_cannot_be_is_refused_before_anything_is_made_of_it(pair: Pair, memory: dict[str, int]) -> None:
    own = pair.consumer.geometry
    hello = Hello(
        pair.consumer.identity.envelope(11),
        own.fingerprint,
        msgspec.structs.replace(own.memory, **memory),
        pair.consumer.process,
    )
    pair.producer.transport.refuses = True
    pair.world.network.append(("tcp://p", hello))
    pair.world.deliver()
    assert pair.refused(pair.producer) == {"incompatible": 1}


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("inf"), float("nan"), 1e6])
def test_a_lease_that_cannot_be_waited_for_is_refused(pair: Pair, lease_s: float) -> None:
    receive = pair.receive()
    pair.world.deliver()
    [welcome] = pair.on_the_way(Welcome)
    assert isinstance(welcome, Welcome)
    pair.world.network = [("tcp://c", msgspec.structs.replace(welcome, lease_s=lease_s))]
    pair.world.deliver()
    assert "lease" in receive.reason


def test_memory_that_cannot_be_reached_fails_the_transfer(pair: Pair) -> None:
    node = pair.producer if pair.world.direction is Direction.PUSH else pair.consumer
    node.transport.refuses = True
    receive = pair.receive()
    pair.world.deliver_all()
    assert "no way there" in receive.reason


def test_a_producer_that_never_answers_fails_the_transfer(pair: Pair) -> None:
    pair.producer.frozen = True
    receive = pair.receive()
    pair.world.advance(SETTINGS.handshake_timeout_s + 0.2)
    assert "did not answer the handshake" in receive.reason


def test_a_failed_write_ends_what_went_the_same_way_and_the_next_transfer_connects_anew(push: Pair) -> None:
    receive, send = in_flight_write(push)
    push.world.complete(push.world.moves()[0], failed=True)
    push.world.pump()
    push.world.settle(0.3)
    assert "the move failed" in receive.reason
    push.producer.abandon_send(send)
    assert push.outcomes()[0] == {"move_failed": 1}
    second, send = push.receive(name="r2"), push.send(name="r2")
    push.complete(send, 0.5)
    assert second.finished
    assert push.nothing_is_left()


def test_a_failed_write_that_may_still_land_is_not_called_over(push: Pair) -> None:
    """The consumer learns at once that the transfer has failed, and keeps the blocks."""
    push.world.ways_can_be_closed = False
    receive, send = in_flight_write(push)
    push.producer.transport.failed_writes_may_land = True
    push.world.complete(push.world.moves()[0], failed=True)
    push.world.pump()
    push.world.settle(SETTINGS.silent_s + 0.3)
    assert "the move failed" in receive.reason
    assert receive.failed.unsafe_blocks
    assert push.outcomes()[1] == {"refused": 1}
    push.producer.abandon_send(send)
    push.world.settle(SETTINGS.lease_s)
    assert not push.producer.endpoint.is_idle
    assert len(push.consumer.free) < len(push.consumer.memory) - 1
    push.producer.transport.failed_writes_may_land = False
    push.world.settle(SETTINGS.renew_s + 0.3)
    assert push.nothing_is_left()


def test_what_could_not_be_summed_up_does_not_count_although_it_arrives(
    push: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has ended between its part of the write and its part of the checksum."""

    def refuse(*_: object, **__: object) -> list[int]:
        raise TransferError("rank 1 of this node has ended")

    monkeypatch.setattr(push.producer.checksums, "of", refuse)
    send = push.send()
    push.producer.compute(send, len(TOKENS))
    push.producer.finish_send(send)  # from here on its blocks stay as they are, so what arrives is there for good
    receive = push.receive()
    push.world.deliver_all()
    push.world.pump()
    push.world.complete(push.world.moves()[0])
    push.world.settle(0.3)
    assert "rank 1 of this node has ended" in receive.reason
    assert receive.valid_tokens == 0
    assert push.outcomes()[0] == {"move_failed": 1}
    assert push.stats()[0].blocks_freed == {"failed": 6}
    assert push.nothing_is_left()


# ── handoffs that fail verification ──


def test_a_request_with_other_tokens_is_refused(pair: Pair) -> None:
    receive, send = pair.receive(), pair.send([9, *TOKENS[1:]])
    pair.world.settle(0.3)
    assert "different tokens" in receive.reason
    assert pair.refused(pair.producer)["token_hash"] == 1
    assert pair.stats()[0].bytes_sent == 0
    pair.producer.abandon_send(send)
    assert pair.nothing_is_left()


def _notice(pair: Pair, **changed: object) -> HandoffNotice:
    notice = HandoffNotice(
        pair.producer.identity.envelope(22), "t-r1", len(TOKENS), token_hash(TOKENS, None, None), 5, 6 * 64, 6, []
    )
    return msgspec.structs.replace(notice, **changed)


@pytest.mark.parametrize(
    ("first_block", "block_ids"),
    [
        ([0], [[1, 2]]),
        ([0, 0], [[1], [2]]),
        ([-1], [[1]]),
        ([0], [[1, 1, 2, 3, 4, 5]]),
        ([0], [[-1, 2, 3, 4, 5, 6]]),
        ([0], [[1, 2, 3, 4, 5, 200]]),
        ([0], [[0, 0, 0, 0, 0, 0]]),
        ([6], [[]]),
    ],
)
def test_blocks_that_do_not_exist_or_do_not_add_up_are_never_written_to(
    push: Pair, first_block: list[int], block_ids: list[list[int]]
) -> None:
    send = push.send()
    push.producer.compute(send, 30)
    push.consumer.endpoint.execute(
        BeginReceive(
            "r1", "t-r1", push.producer.address, len(TOKENS), 0, token_hash(TOKENS, None, None), first_block, block_ids
        )
    )
    push.consumer.receives["r1"] = Receive("r1", "t-r1", TOKENS, 0, [])
    push.world.settle(0.3)
    assert push.consumer.receives["r1"].failed
    assert push.refused(push.producer) == {"invalid": 1}
    assert push.outcomes()[1] == {"refused": 1}


def test_a_notice_that_comes_again_while_its_blocks_are_read_changes_nothing(pull: Pair) -> None:
    _computed(pull)
    pull.world.deliver_all()
    assert pull.world.moves()
    pull.world.network.append(("tcp://c", _notice(pull)))
    pull.world.deliver_all()
    assert pull.refused(pull.consumer) == {"repeated_notice": 1}
    pull.world.settle(0.5)
    assert pull.consumer.receives["r1"].finished


def test_registrations_without_a_request_are_bounded_by_what_they_name(pair: Pair) -> None:
    """Blocks that are not kept may be named as often as one likes."""
    pair.served("r0")
    stamp = int(pair.producer.clock() * 1e6)
    mine = pair.consumer.identity.envelope(11)
    for number in range(2):
        table = [[*[0] * 5999, 1]]
        message = RegisterDestination(mine, stamp, f"t-{number}", 24_000, b"x" * 32, [0], table)
        pair.world.network.append(("tcp://p", message))
        pair.world.deliver_all()
    assert pair.refused(pair.producer) == {"overloaded": 1}


def test_two_requests_with_one_transfer_id_do_not_share_a_transfer(pair: Pair) -> None:
    first = pair.receive()
    second = Receive("r9", "t-r1", TOKENS, 0, [])
    pair.consumer.start_receive(second, pair.producer.address)
    assert second.failed
    send = pair.send()
    pair.complete(send, 0.3)
    assert first.finished


# ── the part that arrived before a failure ──

LONG = list(range(100, 180))  # twenty blocks


def nine_tenths(pair: Pair) -> tuple[Receive, Send]:
    """A push of twenty blocks in chunks; eighteen blocks have arrived."""
    receive, send = pair.begin(LONG)
    for _ in range(9):
        pair.producer.compute(send, 8)
        pair.world.settle(0.15)
    pair.producer.compute(send, 1)  # a step more: the blocks are known to have been the request's until then
    pair.world.settle(0.15)
    return receive, send


@pytest.mark.parametrize("end", ["dies", "aborts", "falls silent", "link breaks"])
def test_a_push_that_dies_keeps_what_had_arrived(push: Pair, end: str) -> None:
    receive, send = nine_tenths(push)
    match end:
        case "dies":
            push.world.kill("p")
            push.world.advance(SETTINGS.renew_s + SETTINGS.silent_s + 2 * SETTINGS.margin_s)
        case "aborts":
            push.producer.abandon_send(send)
            push.world.settle(0.3)
        case "falls silent":
            push.producer.frozen = True
            push.world.advance(SETTINGS.lease_s + 2 * SETTINGS.margin_s)
        case "link breaks":
            push.producer.compute(send, 7)
            push.world.pump()
            push.world.complete(push.world.moves()[0], failed=True)
            push.world.settle(0.3)
    assert receive.valid_tokens == 72  # World has compared them


@pytest.mark.parametrize("consumer_block_size", [4, 8])
def test_what_arrived_counts_in_whole_blocks_of_the_consumer(consumer_block_size: int) -> None:
    pair = Pair()
    pair.consumer = pair.world.add("c", 22, block_size=consumer_block_size)
    receive, send = pair.begin(LONG)
    for count in (12, 9):
        pair.producer.compute(send, count)
        pair.world.settle(0.15)
    pair.producer.abandon_send(send)
    pair.world.settle(0.3)
    assert receive.valid_tokens == (12 if consumer_block_size == 4 else 8)


def test_news_of_arrivals_that_were_lost_make_nothing_wrong(push: Pair) -> None:
    receive, send = push.begin(LONG)
    for number in range(10):
        push.producer.compute(send, 8)
        for _ in range(5):
            push.move_everything()
            push.world.advance(0.01)
            if number == 4:
                push.world.network = [
                    (to, message) for to, message in push.world.network if not isinstance(message, KVArrived)
                ]
        push.world.deliver_all()
    push.producer.abandon_send(send)
    push.world.settle(0.3)
    assert 0 < receive.valid_tokens <= 72


def test_what_was_overwritten_before_it_had_left_is_not_said_to_have_arrived(push: Pair) -> None:
    """The thread sees the completed write before it reads the preemption."""
    receive, send = in_flight_write(push)
    at = taken_before_it_completes(push, send)
    push.world.advance(0.05)
    push.world.deliver_all()
    assert not push.on_the_way(KVArrived)
    hear_of_preemption(push, send, at)
    push.producer.abandon_send(send)
    push.world.settle(0.3)
    assert receive.valid_tokens == 0


def test_with_windows_only_the_table_at_the_end_says_what_arrived(push: Pair) -> None:
    push.producer.endpoint.producer._progress._owned_until_computed = False
    receive, send = nine_tenths(push)
    push.producer.abandon_send(send)
    push.world.settle(0.3)
    assert receive.valid_tokens == 0


def test_a_short_transfer_tells_nothing_on_its_way(push: Pair) -> None:
    seen: list[object] = []
    receive, send = push.receive(), push.send()
    push.complete(send)
    while not receive.over:
        push.move_everything()
        seen += push.on_the_way(KVArrived)
        if push.world.network:
            push.world.deliver()
    assert not seen


# ── checksums ──


def corrupt_once(pair: Pair, number: int) -> None:
    counter = iter(range(1000))
    pair.world.corrupts = lambda: next(counter) == number


@pytest.mark.parametrize("number", [0, 3, 9])
def test_a_block_that_arrives_wrong_is_never_used(pair: Pair, number: int) -> None:
    corrupt_once(pair, number)
    receive, send = pair.begin(LONG)
    for _ in range(10):
        pair.producer.compute(send, 8)
        pair.world.settle(0.15)
    if not send.ended:
        pair.producer.finish_send(send)
    pair.world.settle(0.5)
    assert receive.finished is None
    assert "from p with other bytes than were sent" in receive.reason
    # Two blocks in each post, of which the second is wrong. World has compared the others.
    assert receive.valid_tokens == 8 * number + 4
    stats = pair.stats()[1]
    assert stats.wrong_kv == {"p": 1}
    assert stats.outcomes == {"corrupted": 1}
    assert pair.nothing_is_left()


def test_a_node_whose_blocks_arrive_wrong_again_and_again_is_left_out_for_a_while(pair: Pair) -> None:
    pair.world.corrupts = lambda: True
    for number in range(SETTINGS.max_wrong):
        receive, send = pair.receive(name=f"r{number}"), pair.send(name=f"r{number}")
        pair.complete(send, 0.5)
        assert receive.failed is not None
    pair.world.corrupts = lambda: False
    receive = pair.receive(name="next")
    assert "p is left out" in receive.reason
    assert pair.stats()[1].left_out == ["p"], "routers are told"
    pair.world.now += SETTINGS.keep_link_s + 1
    assert pair.stats()[1].left_out == []
    pair.served("later")


def test_of_a_node_that_sent_a_wrong_block_all_are_checked(direction: Direction) -> None:
    pair = Pair(direction, checksum_policy=ChecksumPolicy.SAMPLE)
    pair.world.corrupts = lambda: True
    receive, send = pair.receive(name="r0"), pair.send(name="r0")
    pair.complete(send, 0.5)
    assert receive.failed is not None
    pair.world.corrupts = lambda: False
    before = pair.stats()[1].blocks_checked
    receive, send = pair.receive(LONG, name="r1"), pair.send(LONG, name="r1")
    pair.complete(send, 0.5)
    assert receive.finished
    assert pair.stats()[1].blocks_checked - before == 20


@pytest.mark.parametrize(("policy", "taken"), [("all", 20), ("sample", 3), ("off", 0)])
def test_as_many_blocks_are_checked_as_the_policy_says(direction: Direction, policy: str, taken: int) -> None:
    pair = Pair(direction, checksum_policy=ChecksumPolicy(policy))
    receive, send = pair.begin(LONG)
    pair.complete(send, 0.5)
    assert receive.finished
    counted = {node.checksums.taken for node in (pair.producer, pair.consumer)}
    assert len(counted) == 1
    assert counted <= ({taken} if taken != 3 else {2, 3})
    assert pair.stats()[1].blocks_checked == pair.consumer.checksums.taken


def test_a_notice_without_the_checksums_that_were_asked_for_is_not_believed(push: Pair) -> None:
    receive, send = push.begin()
    push.world.network.append(("tcp://c", _notice(push)))
    push.world.deliver_all()
    assert receive.finished is None
    assert "0 checksums came for 6 blocks" in receive.reason
    push.producer.abandon_send(send)
    assert push.nothing_is_left()
