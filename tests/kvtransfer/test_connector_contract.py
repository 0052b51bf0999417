"""The contract that every connector must keep, in every direction, between real processes.

Slow: each process imports torch and the connector's library. Most tests share one pair of processes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kv_connectors import WAYS
from kv_document import installed_example
from kv_fake_engine import BLOCK_SIZE, first_token_of
from kv_processes import EngineProcess

from tandem.base.wings import is_there
from tandem.kvtransfer.base import Handoff, TransferStats
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, TransferRole
from tests.more import more
from tests.waiting import until

pytestmark = pytest.mark.slow

LEASE_S = 2.0
CONNECTORS = [*WAYS, ("local_connector:create", "push")]
# Ranks that are processes, with their own heads or their stage's layers. test_wide_caches.py has all widths and stages.
TWO: dict[str, Any] = {"ranks": 2, "checksums": "all"}
WIDE = [
    pytest.param((("nixl", "push"), TWO, TWO | {"ranks": 4}), id="2to4-push"),
    pytest.param((("nixl", "pull"), TWO | {"cuts": (1,)}, TWO | {"cuts": (3,)}), id="2to2-pull"),
]
if not is_there("kv_wide_engine"):
    WIDE = []
LONE = [pytest.param((connector,), id="-".join(connector)) for connector in CONNECTORS]
# Of what the protocol decides before a connector moves anything, one connector and a stranger's are enough in every run.
SOME = [
    pytest.param(connector, id="-".join(connector), marks=() if connector in (CONNECTORS[0], CONNECTORS[-1]) else pytest.mark.more)
    for connector in CONNECTORS
]  # fmt: skip
names = (f"r{number}" for number in itertools.count())
epochs = itertools.count(1000)


class Pair:
    def __init__(self, connector: str, direction: str, producer: dict[str, Any], consumer: dict[str, Any]) -> None:
        self.connector = connector
        common = {"direction": direction, "lease_s": LEASE_S, "timeout_s": 15.0}
        self.options = {"p": common | producer, "c": common | consumer}
        # Both start while the other does.
        self.producer = self.start("p")
        self.consumer = self.start("c")

    def start(self, node_id: str) -> EngineProcess:
        return EngineProcess(self.connector, node_id, next(epochs), **self.options[node_id])

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()

    def add(
        self,
        tokens: list[int],
        *,
        on: str = "both",
        name: str | None = None,
        producer: dict[str, Any] | None = None,
        consumer: dict[str, Any] | None = None,
    ) -> str:
        name = name or next(names)
        if on in ("both", "c"):
            self.consumer.call("add", name, tokens, self._part(TransferRole.CONSUME, name), **(consumer or {}))
        if on in ("both", "p"):
            self.producer.call("add", name, tokens, self._part(TransferRole.PRODUCE, name), **(producer or {}))
        return name

    def _part(self, role: TransferRole, name: str) -> KVTransferParams:
        peer: PeerAddress = (self.producer if role is TransferRole.CONSUME else self.consumer).address
        return KVTransferParams(f"transfer-{name}", role, peer)

    def until_registered(self) -> None:
        until(lambda: self.producer.call("stats").in_progress > 0)

    def expect_loaded(self, name: str, tokens: list[int]) -> None:
        self.consumer.begin("run_until", name, ["loaded", "failed"])
        self.producer.call("run_until", name, ["freed"])
        assert self.consumer.result() == "loaded", self.consumer.call("failure", name)
        assert self.consumer.call("handoff", name) == Handoff(first_token_of(tokens), len(tokens))
        assert self.consumer.call("kv_is_right", name)
        self.consumer.call("finish", name)

    def expect_nothing_left(self, blocks: int = 63) -> None:
        for engine in (self.producer, self.consumer):
            assert engine.call("num_free") == blocks
            assert engine.call("stats").in_progress == 0

    def stats(self) -> tuple[TransferStats, TransferStats]:
        return self.producer.call("stats"), self.consumer.call("stats")


@contextmanager
def started(connector: tuple[str, str], producer: Any = None, consumer: Any = None) -> Iterator[Pair]:
    pair = Pair(*connector, producer or {}, consumer or {})
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module", autouse=True)
def _documents_connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_example(tmp_path_factory.mktemp("document")):
        yield


@pytest.fixture(scope="module", params=LONE + WIDE)
def shared(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with started(*request.param) as pair:
        yield pair


def a_prompt(length: int) -> list[int]:
    return [3 * number % 97 for number in range(length)]


# ── bytes ──


@pytest.mark.parametrize("length", [1, BLOCK_SIZE, BLOCK_SIZE + 1, 37])
@pytest.mark.parametrize("chunk", [3, 8, 1000])
def test_the_consumer_has_the_producers_bytes(shared: Pair, length: int, chunk: int) -> None:
    tokens = a_prompt(length)
    before = shared.stats()
    name = shared.add(tokens, producer={"chunk": chunk})
    shared.expect_loaded(name, tokens)
    after = shared.stats()
    blocks = -(-length // BLOCK_SIZE)
    assert after[0].blocks_sent - before[0].blocks_sent == blocks
    assert after[1].blocks_received - before[1].blocks_received == blocks
    assert after[0].bytes_sent - before[0].bytes_sent == after[1].bytes_received - before[1].bytes_received
    shared.expect_nothing_left()


@pytest.mark.parametrize(("on_producer", "on_consumer"), [(16, 0), (0, 16), (16, 8), (8, 16)])
def test_what_either_node_has_in_its_prefix_cache_is_used(shared: Pair, on_producer: int, on_consumer: int) -> None:
    tokens = a_prompt(30)
    before = shared.stats()[0].blocks_sent
    name = shared.add(
        tokens, producer={"cached_tokens": on_producer, "chunk": 8}, consumer={"cached_tokens": on_consumer}
    )
    shared.expect_loaded(name, tokens)
    assert shared.stats()[0].blocks_sent - before == 8 - on_consumer // BLOCK_SIZE
    shared.expect_nothing_left()


@pytest.mark.parametrize("first", ["p", "c"])
def test_either_node_may_hear_of_the_request_long_before_the_other(shared: Pair, first: str) -> None:
    tokens = a_prompt(21)
    name = shared.add(tokens, on=first)
    if first == "p":
        shared.producer.call("run_until", name, ["ended"])
    else:
        shared.consumer.call("step")
    shared.add(tokens, on="c" if first == "p" else "p", name=name)
    shared.expect_loaded(name, tokens)
    shared.expect_nothing_left()


def test_many_transfers_at_once(shared: Pair) -> None:
    prompts = {shared.add(tokens, producer={"chunk": 6}): tokens for tokens in map(a_prompt, range(5, 45, 5))}
    for name, tokens in prompts.items():
        shared.expect_loaded(name, tokens)
    shared.expect_nothing_left()


def test_a_preempted_prompt_arrives_all_the_same(shared: Pair) -> None:
    tokens = a_prompt(33)
    name = shared.add(tokens, producer={"chunk": 8})
    shared.consumer.call("step")
    shared.producer.call("step")
    shared.producer.call("step")
    shared.producer.call("preempt", name)
    shared.expect_loaded(name, tokens)
    shared.expect_nothing_left()


# ── transfers that fail ──


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_on_the_consumer_frees_both(shared: Pair, steps: int) -> None:
    name = shared.add(a_prompt(40), producer={"chunk": 8})
    shared.consumer.call("step")
    for _ in range(steps):
        shared.producer.call("step")
    shared.consumer.call("finish", name)
    shared.consumer.call("run_until", name, ["freed"])
    shared.producer.call("run_until", name, ["freed"])
    shared.expect_nothing_left()


def test_an_abort_on_the_consumer_before_it_asked_for_anything_frees_the_producer(shared: Pair) -> None:
    name = shared.add(a_prompt(40))
    shared.producer.call("run_until", name, ["ended"])
    shared.consumer.call("finish", name)
    shared.consumer.call("step")
    shared.producer.call("run_until", name, ["freed"], timeout_s=LEASE_S / 2)
    shared.expect_nothing_left()


@pytest.mark.parametrize("steps", [0, 2])
def test_an_abort_on_the_producer_fails_the_consumer_at_once(shared: Pair, steps: int) -> None:
    name = shared.add(a_prompt(40), producer={"chunk": 8})
    shared.consumer.call("step")
    for _ in range(steps):
        shared.producer.call("step")
    shared.producer.call("finish", name)
    shared.producer.call("run_until", name, ["freed"])
    shared.consumer.call("run_until", name, ["failed"], timeout_s=LEASE_S / 2)
    assert "ended before its prompt was computed" in shared.consumer.call("failure", name)
    shared.consumer.call("finish", name)
    shared.expect_nothing_left()


def test_a_different_cache_salt_is_refused(shared: Pair) -> None:
    tokens = a_prompt(20)
    name = shared.add(tokens, producer={"cache_salt": "one"}, consumer={"cache_salt": "another"})
    shared.consumer.begin("run_until", name, ["loaded", "failed"])
    shared.producer.call("run_until", name, ["freed"])
    assert shared.consumer.result() == "failed"
    shared.consumer.call("finish", name)
    shared.expect_nothing_left()


def test_a_producer_that_nobody_asks_frees_its_blocks_when_the_lease_ends(shared: Pair) -> None:
    expired = shared.stats()[0].leases_expired
    name = shared.add(a_prompt(20), on="p")
    shared.producer.call("run_until", name, ["freed"], timeout_s=LEASE_S + 2)
    assert shared.stats()[0].leases_expired == expired + 1
    shared.expect_nothing_left()


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16 to 32": ({"block_size": 16, "num_blocks": 20}, {"block_size": 32, "num_blocks": 90}),
    "32 to 16": ({"block_size": 32, "num_blocks": 90}, {"block_size": 16, "num_blocks": 20}),
    "another layout": ({"tokens_before_heads": True}, {}),
    "both": ({"block_size": 8}, {"block_size": 4, "tokens_before_heads": True}),
}


# Which bytes go where is the protocol's; a connector moves them.
@pytest.mark.parametrize(
    ("connector", "producer", "consumer"),
    [
        pytest.param(
            connector,
            *nodes,
            id="-".join((*connector, what)),
            marks=[] if what == "both" or connector == ("nixl", "push") else pytest.mark.more,
        )
        for connector in CONNECTORS
        for what, nodes in DIFFERENT.items()
    ],
)
def test_block_sizes_and_layouts_may_differ(
    connector: tuple[str, str], producer: dict[str, Any], consumer: dict[str, Any]
) -> None:
    with started(connector, producer, consumer) as pair:
        for length, chunk, on_consumer in [(1, 99, 0), (31, 99, 0), (32, 7, 0), (77, 20, 32), (96, 96, 64)]:
            tokens = a_prompt(length)
            name = pair.add(tokens, producer={"chunk": chunk}, consumer={"cached_tokens": on_consumer})
            pair.expect_loaded(name, tokens)
            for engine, node in ((pair.producer, producer), (pair.consumer, consumer)):
                assert engine.call("num_free") == node.get("num_blocks", 64) - 1
        sent, received = pair.stats()
        assert sent.blocks_sent == received.blocks_received
        assert sent.descriptors_sent > sent.blocks_sent or connector[1] == "pull"


@pytest.mark.parametrize("connector", SOME)
@pytest.mark.parametrize(
    ("producer", "consumer", "why"),
    [
        ({"block_size": 8}, {"block_size": 12}, "block_size is 8 here and 12 there"),
        *more([({}, {"dtype": "bfloat16"}, "dtype is 'float32' here and 'bfloat16' there")]),
    ],
)
def test_caches_that_do_not_fit_are_refused_by_name_on_both_sides(
    connector: tuple[str, str], producer: dict[str, Any], consumer: dict[str, Any], why: str
) -> None:
    with started(connector, producer, consumer) as pair:
        name = pair.add(a_prompt(20))
        pair.consumer.call("run_until", name, ["failed"], timeout_s=3)
        assert why in pair.consumer.call("failure", name)
        pair.consumer.call("finish", name)
        pair.producer.call("run_until", name, ["freed"], timeout_s=LEASE_S + 2)
        assert set(pair.stats()[0].refused) == {"incompatible"}  # once, or again where the answer was late
        pair.expect_nothing_left()


@pytest.mark.parametrize("connector", CONNECTORS, ids="-".join)
@pytest.mark.parametrize("block_size", [4, *more([8])])
def test_layers_leave_while_the_next_ones_are_computed(connector: tuple[str, str], block_size: int) -> None:
    options = {} if ":" in connector[0] else {"options": {"layerwise_tokens": "16"}}
    producer = options | {"layer_s": 0.03, "block_size": block_size}
    with started(connector, producer, {"layer_s": 0.03}) as pair:
        first = a_prompt(20)
        pair.expect_loaded(pair.add(first), first)  # so that the two nodes have a link
        tokens = a_prompt(150)
        before = pair.stats()[0]
        name = pair.add(tokens, on="c")
        pair.consumer.call("step")
        pair.until_registered()
        pair.add(tokens, on="p", name=name)
        pair.expect_loaded(name, tokens)
        after = pair.stats()[0]
        if connector[1] == "push":  # all in one chunk: but for its last layer it had arrived when it was computed
            overlapped = after.bytes_overlapped - before.bytes_overlapped
            assert overlapped >= 0.7 * (after.bytes_sent - before.bytes_sent)
        # And with a preemption between two chunks.
        name = pair.add(tokens, producer={"chunk": 40})
        pair.consumer.call("step")
        pair.producer.call("step")
        pair.producer.call("step")
        pair.producer.call("preempt", name)
        pair.expect_loaded(name, tokens)
        pair.expect_nothing_left()


# ── a process that dies (test_peer_faults.py has the others) ──


@pytest.mark.parametrize("checksums", ["all", *more(["off"])])
@pytest.mark.parametrize("connector", [connector for connector in CONNECTORS if connector[1] == "push"])
def test_a_push_that_is_killed_at_nine_tenths_keeps_them(connector: tuple[str, str], checksums: str) -> None:
    tokens = a_prompt(160)
    with started(connector, {"checksums": checksums}, {"checksums": checksums}) as own:
        own.expect_loaded(own.add(tokens), tokens)  # so that there is a connection
        name = own.add(tokens, producer={"chunk": 8})
        own.consumer.call("step")
        own.until_registered()
        for number in range(19):
            own.producer.call("step")
            until(lambda sent=40 + 2 * (number + 1): own.producer.call("stats").blocks_sent >= sent)
        time.sleep(0.2)  # the news of it
        own.producer.kill()
        own.consumer.call("run_until", name, ["failed"], timeout_s=LEASE_S + 8)
        assert own.consumer.call("valid_tokens", name) >= 144
        assert own.consumer.call("kv_is_right", name)
        own.consumer.call("finish", name)
        own.consumer.call("run_until_free", 63, timeout_s=LEASE_S + 8)
        own.producer = own.start("p")
