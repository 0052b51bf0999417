"""The line between rank 0 and another rank never makes its caller wait and loses nothing, and its end wakes those that wait for an answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import HeadShare, KVCacheMemory
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.ranks.lines import (
    CacheOpened,
    Done,
    FromRank,
    HeadsSummed,
    MessageLine,
    MoveOver,
    OpenCache,
    OpenWay,
    RankLine,
    SumUp,
    ToRank,
)
from tandem.kvtransfer.nixl.ranks.sharded import ShardedTransport
from tandem.kvtransfer.nixl.ranks.thread import RankTransfers
from tandem.kvtransfer.nixl.transport import NixlAgent
from tandem.kvtransfer.protocol.cache_map import AXES, BlockLayout, GrainPlace, Mapping
from tandem.kvtransfer.protocol.checksums import CacheChecksums
from tandem.kvtransfer.protocol.transport import HandleId, Operation
from tests.waiting import until

PATIENCE_S = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[RankLine, MessageLine]]:
    ours, theirs = socket.socketpair()
    line, far = RankLine(1, ours), MessageLine(theirs, ToRank)
    yield line, far
    line.close()
    far.close()


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 400_000), min_size=1, max_size=8))
def test_messages_of_any_size_arrive_whole_and_in_order(sizes: list[int]) -> None:
    """None of it waits, although a socket takes less than the largest."""
    ours, theirs = socket.socketpair()
    sender, receiver = MessageLine(ours, FromRank), MessageLine(theirs, FromRank)
    sent = [HeadsSummed(number, bytes(size)) for number, size in enumerate(sizes)]
    for message in sent:
        sender.send(message)
    received: list[object] = []
    while len(received) < len(sent):
        received += receiver.receive()
        sender.flush()
    assert received == sent
    sender.send(Done(1))
    sender.close()
    assert receiver.receive() == [Done(1)], "what was sent before the end is not lost"
    assert receiver.receive() == []
    assert receiver.is_over
    receiver.close()


def test_a_rank_that_ends_fails_what_waits_for_it_and_its_moves(ends: tuple[RankLine, MessageLine]) -> None:
    line, far = ends
    first, second = (line.post(7, "write", 64, bytes(8), bytes(8)) for _ in range(2))
    asked = line.ask(OpenWay)
    assert [type(message).__name__ for message in far.receive()] == ["PostMove", "PostMove", "OpenWay"]
    far.send(MoveOver(first))
    far.close()
    line.hear()
    assert line.outcome(first) == ""
    assert line.outcome(second) == "rank 1 of this node has ended"
    with pytest.raises(TransferError, match="rank 1 of this node has ended"):
        line.answer(asked, Done, time.monotonic() + PATIENCE_S)
    line.ask(OpenWay)  # goes nowhere, and raises nothing
    assert line.has_ended()


def test_an_answer_that_does_not_come_is_given_up_and_one_that_is_late_is_nothing(
    ends: tuple[RankLine, MessageLine],
) -> None:
    line, far = ends
    asked = line.ask(OpenWay)
    with pytest.raises(TransferError, match="rank 1 of this node does not answer"):
        line.answer(asked, Done, time.monotonic())
    far.send(Done(asked))
    again = line.ask(OpenWay)
    far.send(Done(again, yes=False))
    assert not line.answer(again, Done, time.monotonic() + PATIENCE_S).yes


def a_rank(failed: threading.Event) -> tuple[RankLine, RankTransfers]:
    ours, theirs = socket.socketpair()
    cache = torch.zeros(8, 2, 2, 1, 4, 8)
    memory = KVCacheMemory(cache, "m", 2, 1, 1000, heads=HeadShare(1, 1, 2))
    transfers = RankTransfers(theirs, memory, failed.set)
    transfers.start()
    return RankLine(1, ours), transfers


@pytest.mark.parametrize("opened", [False, True])
def test_a_ranks_thread_ends_with_its_line(opened: bool) -> None:
    failed = threading.Event()
    line, transfers = a_rank(failed)
    if opened:
        number = line.ask(OpenCache, name="rank", host="127.0.0.1", options=NixlOptions())
        shard = line.answer(number, CacheOpened, time.monotonic() + PATIENCE_S).shard
        assert (shard.first_head, shard.num_heads) == (1, 1)
    line.close()
    transfers.join(PATIENCE_S)
    assert not transfers.is_alive
    assert not failed.is_set()


def test_a_bug_in_the_thread_is_not_silent() -> None:
    failed = threading.Event()
    line, transfers = a_rank(failed)
    number = line.ask(SumUp, blocks=[99], parts=[0], grain=4, on_device=False, by_layer=False)  # there is no such block
    with pytest.raises(TransferError, match="rank 1 of this node has ended"):
        line.answer(number, HeadsSummed, time.monotonic() + PATIENCE_S)
    transfers.join(PATIENCE_S)
    assert failed.is_set()
    line.close()


def a_node(
    cache: torch.Tensor, name: str, first: int = 1
) -> tuple[ShardedTransport, list[RankTransfers], list[KVCacheMemory]]:
    """A node with one rank for each head. `first`: the first rank that is not this process, as in `ShardedTransport`."""
    lines, threads, ranks = [], [], []
    for head in range(cache.shape[3]):
        kept = cache[:, :, :, head : head + 1].clone()
        ranks.append(KVCacheMemory(kept, "m", 2, 1, 1000, heads=HeadShare(head, 1, cache.shape[3])))
        if head >= first:
            ours, theirs = socket.socketpair()
            lines.append(ours)
            threads.append(RankTransfers(theirs, ranks[head], threading.Event().set))
            threads[-1].start()
    return ShardedTransport(NixlAgent(name, NixlOptions()), lines), threads, ranks


def test_a_cache_in_shards_is_reached_in_another_way_at_all_ranks_and_the_first_is_closed() -> None:
    wide, threads, (memory, _) = a_node(torch.zeros(8, 2, 2, 2, 4, 8), "wide")
    whole = torch.arange(8 * 2 * 2 * 2 * 4 * 8, dtype=torch.float32).view(8, 2, 2, 2, 4, 8)
    narrow = ShardedTransport(NixlAgent("narrow", NixlOptions()))
    try:
        first = wide.register(memory)
        ours = narrow.register(KVCacheMemory(whole, "m", 2, 1, 1000))
        assert ours.shards == []
        assert [(shard.first_head, shard.num_heads) for shard in first.shards] == [(0, 1), (1, 1)]
        another = wide.reopen()
        assert another is not None
        for before, after in zip(first.shards, another.shards, strict=True):
            assert before.agent_metadata != after.agent_metadata
            assert before.base_address == after.base_address
        assert wide.close_earlier()
        remote = narrow.connect(another)
        until_done(narrow, narrow.post(remote, by_head().move(Operation.WRITE, "t", [GrainPlace(3, 0, 5, 0)])))
        assert torch.equal(memory.tensor[5], whole[3, :, :, :1])
        sums = wide.sums_elsewhere([5], [0], 4, False, False).wait()
        other = KVCacheMemory(whole[:, :, :, 1:].clone(), "m", 2, 1, 1000, heads=HeadShare(1, 1, 2))
        assert sums[0].sums == CacheChecksums(other).of_heads([3], [0], 4, on_device=False).sums
        assert not narrow.may_still_write(remote)
        narrow.disconnect(remote)
    finally:
        narrow.close()
        wide.close()
        wide.close()  # idempotent
    all_end(threads)


def test_a_node_whose_ranks_are_all_other_processes_reads_and_writes_as_others_do() -> None:
    apart, threads, ranks = a_node(torch.zeros(8, 2, 2, 2, 4, 8), "apart", first=0)
    whole = torch.arange(8 * 2 * 2 * 2 * 4 * 8, dtype=torch.float32).view(8, 2, 2, 2, 4, 8)
    pool = KVCacheMemory(torch.empty(whole.shape, device="meta"), "m", 2, 1, 1000)
    narrow = ShardedTransport(NixlAgent("near", NixlOptions()))
    mapping = by_head()
    try:
        first, ours = apart.register(pool), narrow.register(KVCacheMemory(whole, "m", 2, 1, 1000))
        assert [(shard.first_head, shard.num_heads) for shard in first.shards] == [(0, 1), (1, 1)]
        remote = apart.connect(ours)
        until_done(apart, apart.post(remote, mapping.move(Operation.READ, "t", [GrainPlace(5, 0, 3, 0)])))
        assert all(torch.equal(rank.tensor[5], whole[3, :, :, at : at + 1]) for at, rank in enumerate(ranks))
        until_done(apart, apart.post(remote, mapping.move(Operation.WRITE, "t", [GrainPlace(5, 0, 6, 0)])))
        assert torch.equal(whole[6], whole[3])
        there = CacheChecksums(pool, apart.sums_elsewhere)
        assert there.of([5], [0], mapping) == CacheChecksums(KVCacheMemory(whole, "m", 2, 1, 1000)).of(
            [3], [0], mapping
        )
        another = apart.reopen()
        assert another is not None
        assert all(
            new.agent_metadata != old.agent_metadata for new, old in zip(another.shards, first.shards, strict=True)
        )
        apart.disconnect(remote)
        assert apart.close_earlier()
        again = narrow.connect(another)
        until_done(narrow, narrow.post(again, mapping.move(Operation.WRITE, "t", [GrainPlace(2, 0, 1, 0)])))
        assert torch.equal(ranks[1].tensor[1], whole[2, :, :, 1:])
    finally:
        narrow.close()
        apart.close()
    all_end(threads)


def test_lines_of_a_cache_that_was_never_registered_end() -> None:
    apart, threads, _ = a_node(torch.zeros(8, 2, 2, 2, 4, 8), "apart", first=0)
    apart.close()
    all_end(threads)


def test_a_peer_that_another_rank_cannot_reach_fails_the_move_and_not_the_node() -> None:
    wide, threads, (memory, _) = a_node(torch.zeros(8, 2, 2, 2, 4, 8), "wide")
    there, others, (far, _) = a_node(torch.zeros(8, 2, 2, 2, 4, 8), "there")
    try:
        wide.register(memory)
        described = there.register(far)
        lost = msgspec.structs.replace(described.shards[1], agent_metadata=b"nonsense" * 40)
        remote = wide.connect(msgspec.structs.replace(described, shards=[described.shards[0], lost]))
        move = by_head().move(Operation.WRITE, "t", [GrainPlace(3, 0, 5, 0)])
        with pytest.raises(TransferError, match="NIXL: loading the peer's metadata"):
            until_done(wide, wide.post(remote, move))
        assert wide.may_still_write(remote)

        def has_stopped() -> bool:
            wide.stop_writing(remote)
            return not wide.may_still_write(remote)

        until(has_stopped)
        wide.disconnect(remote)
        until_done(wide, wide.post(wide.connect(described), move))
    finally:
        wide.close()
        there.close()
    all_end([*threads, *others])


def by_head() -> Mapping:
    layout = BlockLayout(AXES, {"slot": 2, "kv": 2, "head": 2, "token": 4, "dim": 8}, 4)
    mapping = Mapping.between(layout, layout, by_head=True)
    assert isinstance(mapping, Mapping)
    return mapping


def all_end(threads: list[RankTransfers]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive


def until_done(transport: ShardedTransport, handle: HandleId) -> None:
    until(lambda: transport.is_done(handle))
