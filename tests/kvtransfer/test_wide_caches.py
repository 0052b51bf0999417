"""Nodes whose ranks keep their heads, and their stage's layers, apart hand over to nodes of any width and stages, over NIXL itself."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_fake_engine import FakeEngine, consume, first_token_of, produce
from kv_wide_engine import WideFakeEngine

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import Handoff, KVCacheMemory
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.nixl.ranks import thread as rank_thread
from tandem.kvtransfer.nixl.transport import NixlTransport
from tandem.kvtransfer.protocol.checksums import CacheChecksums
from tandem.wire.nodes import PeerAddress
from tests.kvtransfer.kv_resources import leaves_nothing_behind
from tests.more import more

LEASE_S = 10.0  # no test waits for its end, and a busy machine has many threads of ranks to run
epochs = itertools.count(5000)


class Pair:
    def __init__(self, config: TransferConfig, producer: dict[str, Any], consumer: dict[str, Any]) -> None:
        self.ids = (next(epochs), next(epochs))
        self.producer = self._start("p", self.ids[0], config, **producer)
        self.consumer = self._start("c", self.ids[1], config, **consumer)

    @staticmethod
    def _start(name: str, epoch: int, config: TransferConfig, ranks: int = 1, **options: Any) -> FakeEngine:
        kind: Any = FakeEngine if ranks == 1 else WideFakeEngine
        wide = {} if ranks == 1 else {"ranks": ranks}
        engine: FakeEngine = kind("nixl", name, epoch, config, **wide, **options)
        return engine

    def add(self, name: str, tokens: list[int], chunk: int = 1 << 30, cached: int = 0) -> None:
        self.consumer.add(
            name,
            tokens,
            consume(f"t-{name}", PeerAddress("p", self.ids[0], self.producer.endpoint())),
            cached_tokens=cached,
        )
        self.producer.add(
            name, tokens, produce(f"t-{name}", PeerAddress("c", self.ids[1], self.consumer.endpoint())), chunk
        )
        self.consumer.step()

    def end_of(self, name: str) -> str:
        """How the request ends at the consumer. The producer has its blocks back."""
        produced = threading.Thread(target=self.producer.run_until, args=(name, ["freed"]))
        produced.start()
        state = self.consumer.run_until(name, ["loaded", "failed", "freed"])
        produced.join()
        return state

    def hand_over(self, name: str, tokens: list[int], chunk: int = 1 << 30, cached: int = 0) -> None:
        self.add(name, tokens, chunk, cached)
        assert self.end_of(name) == "loaded", self.consumer.failure(name)
        assert self.consumer.handoff(name) == Handoff(first_token_of(tokens), len(tokens))
        assert self.consumer.kv_is_right(name)
        self.consumer.finish(name)

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()


@contextlib.contextmanager
def started(
    direction: str, producer: dict[str, Any], consumer: dict[str, Any], *, checksums: str = "all", **options: str
) -> Iterator[Pair]:
    config = TransferConfig(
        direction=direction,  # type: ignore[arg-type]
        lease_s=LEASE_S,
        timeout_s=15.0,
        checksums=checksums,  # type: ignore[arg-type]
        options={"layerwise_tokens": "16", **options},
    )
    pair = Pair(config, producer, consumer)
    try:
        yield pair
    finally:
        pair.close()


def a_prompt(length: int) -> list[int]:
    return [3 * number % 97 for number in range(length)]


# The direction, and the block sizes of producer and consumer.
WAYS = [(direction, sizes) for sizes in ((4, 4), (4, 8), (8, 4)) for direction in ("push", "pull")]


# Ranks, and where four layers are cut. Four ranks of one stage keep each of two heads twice.
STAGES = [
    ((1, ()), (2, ())),
    ((4, ()), (2, ())),
    ((2, (2,)), (1, ())),
    ((1, ()), (2, (2,))),
    ((2, (1,)), (2, (3,))),
    ((4, (2,)), (2, ())),
    ((2, ()), (4, (3,))),
    ((4, (1,)), (3, (1, 2))),
    ((4, (1, 2, 3)), (4, ())),
    ((8, (2,)), (4, (2,))),
]


# Each pair of nodes in one way, and each way with one pair at least.
CASES = [(cuts, *WAYS[number % len(WAYS)]) for number, cuts in enumerate(STAGES)]


@pytest.mark.parametrize(
    ("cuts", "direction", "sizes"),
    [*CASES, *more(case for case in ((cuts, *way) for cuts in STAGES for way in WAYS) if case not in CASES)],
    ids=lambda given: "to".join(f"{ranks}cut{cut}" for ranks, cut in given) if given in STAGES else None,
)
def test_every_rank_has_the_bytes_of_its_layers(
    cuts: tuple[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]], direction: str, sizes: tuple[int, int]
) -> None:
    producer, consumer = (
        {"ranks": ranks, "block_size": size} | ({"cuts": cut} if cut else {})
        for (ranks, cut), size in zip(cuts, sizes, strict=True)
    )
    with started(direction, producer, consumer) as pair:
        prompts = [(1, 99, 0), (21, 3, 0), (48, 20, 16), (96, 96, 0), (130, 40, 8)]
        for number, (length, chunk, cached) in enumerate(prompts):
            pair.hand_over(f"r{number}", a_prompt(length), chunk, cached)
        stats = pair.consumer.stats()
        assert stats.outcomes == {"received": len(prompts)}
        assert stats.blocks_checked >= stats.blocks_received
        assert pair.producer.num_free() == pair.consumer.num_free() == 63


@pytest.fixture
def checksums_of_ranks(monkeypatch: pytest.MonkeyPatch) -> list[CacheChecksums]:
    """Of all ranks but the first of each engine: the producer's, then the consumer's."""
    made: list[CacheChecksums] = []

    def make(memory: KVCacheMemory) -> CacheChecksums:
        made.append(CacheChecksums(memory))
        return made[-1]

    monkeypatch.setattr(rank_thread, "CacheChecksums", make)
    return made


@pytest.mark.parametrize(
    ("direction", "rank", "cuts"),
    [
        ("push", 1, ()),
        ("pull", 3, (1,)),
        ("push", 2, (1,)),
        *more([("push", 3, ()), ("pull", 1, ()), ("pull", 2, ()), ("push", 1, (1,)), ("pull", 2, (1,))]),
    ],
)
def test_one_bit_that_is_wrong_with_any_rank_fails_the_handoff(
    direction: str, rank: int, cuts: tuple[int, ...], checksums_of_ranks: list[CacheChecksums]
) -> None:
    """Four ranks and two heads: each head has two copies, and both count. Or each has some heads of some layers."""
    with started(direction, {"ranks": 2}, {"ranks": 4, "cuts": cuts}) as pair:
        assert isinstance(pair.consumer, WideFakeEngine)
        (_, *of_consumer), cache = checksums_of_ranks, pair.consumer.caches[rank]
        checksums = of_consumer[rank - 1]
        take = checksums.of_heads

        def spoil_first(blocks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            cache[blocks[0]].view(-1).view(torch.uint8)[7] ^= 16
            return take(blocks, *args, **kwargs)

        checksums.of_heads = spoil_first  # type: ignore[method-assign]
        tokens = a_prompt(33)
        pair.add("r", tokens)
        assert pair.end_of("r") == "failed"
        assert "arrived from p with other bytes than were sent" in pair.consumer.failure("r")
        stats = pair.consumer.stats()
        assert stats.wrong_kv == {"p": 1}
        assert stats.outcomes == {"corrupted": 1}
        pair.consumer.finish("r")
        assert pair.producer.num_free() == pair.consumer.num_free() == 63


def test_a_rank_that_cannot_sum_up_costs_the_handoff_and_not_the_senders_name(
    checksums_of_ranks: list[CacheChecksums],
) -> None:
    with started("push", {}, {"ranks": 2}) as pair:
        assert isinstance(pair.consumer, WideFakeEngine)

        def refuse(*_: Any, **__: Any) -> Any:
            raise TransferError("no")

        (checksums,) = checksums_of_ranks
        checksums.of_heads = refuse  # type: ignore[method-assign]
        pair.add("r", a_prompt(33))
        assert pair.end_of("r") == "failed"
        stats = pair.consumer.stats()
        assert stats.outcomes == {"move_failed": 1}
        assert not stats.wrong_kv
        pair.consumer.finish("r")


def test_a_wide_node_leaves_no_thread_and_no_socket_behind() -> None:
    def round_trip() -> None:
        with started("push", {"ranks": 2}, {"ranks": 4}) as pair:
            pair.hand_over("r", a_prompt(20))

    leaves_nothing_behind(round_trip)


@pytest.mark.parametrize(
    ("direction", "posts_before"),
    [("push", 1), ("pull", 0), *more([("push", 0), ("push", 3), ("pull", 1), ("pull", 3)])],
)
def test_a_part_that_fails_at_one_rank_fails_the_transfer_and_the_next_one_goes_well(
    direction: str, posts_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: Iterator[int] | None = None
    refused: list[Any] = []

    class FailingTransport(NixlTransport):
        def post(self, *given: Any) -> Any:
            if left is not None and next(left) <= 0:
                refused.append(given)
                raise TransferError("injected: not posted")
            return super().post(*given)

    monkeypatch.setattr(rank_thread, "NixlTransport", FailingTransport)
    with started(direction, {"ranks": 2}, {"ranks": 2}) as pair:
        pair.hand_over("first", a_prompt(20))
        left = itertools.count(posts_before, -1)
        pair.add("failing", a_prompt(90), 8)
        state = pair.end_of("failing")
        if not posts_before:
            assert refused
        assert state == ("failed" if refused else "loaded")  # a prompt that is moved at once takes few posts
        if refused:
            assert "injected: not posted" in pair.consumer.failure("failing")
        assert pair.consumer.kv_is_right("failing")
        pair.consumer.finish("failing")
        left = None
        pair.hand_over("next", a_prompt(90), 8)
        pair.consumer.run_until_free(63)
        pair.producer.run_until_free(63)
