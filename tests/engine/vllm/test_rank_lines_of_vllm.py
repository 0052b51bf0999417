"""Several ranks of vLLM, each a process of its own, hand over what they keep together. Here the ranks are this process's threads."""

from __future__ import annotations

import dataclasses
import math
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.vllm.handover import Handover
from tandem.engine.vllm.layout import RankOf, VllmCache
from tandem.engine.vllm.ranks import RankHandover, RanksDoor, check_ranks
from tandem.engine.wings import Connect
from tandem.kvtransfer.base import SchedulerConnector, WorkerConnector
from tandem.kvtransfer.memory import KVCacheMemory
from tandem.kvtransfer.nixl.options import NixlOptions
from tandem.kvtransfer.nixl.ranks.sharded import ShardedTransport
from tandem.kvtransfer.nixl.transport import NixlAgent
from tandem.kvtransfer.protocol.cache_map import GrainPlace, Mapping, PoolGeometry
from tandem.kvtransfer.protocol.checksums import CacheChecksums
from tandem.kvtransfer.protocol.transport import Operation
from tests.engine.vllm.test_handover import Moves, Plans

BLOCKS, TOKENS, LAYERS, HEADS, BYTES = 5, 4, 3, 4, 16


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int

    @property
    def page_size_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * BYTES


def config_of(ranks: int, layout: str = "BLHNC") -> Any:
    spec = FullAttentionSpec(TOKENS, max(1, HEADS // ranks))
    stride = LAYERS * spec.page_size_bytes
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{number}" for number in range(LAYERS)])
    tensor = SimpleNamespace(block_stride=stride, size=stride * BLOCKS)
    return SimpleNamespace(
        kv_cache_groups=[group], num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_layout=layout
    )


class Registers(Moves):
    """Registers with a real transport, and moves nothing by itself."""

    def __init__(self, name: str, lines: Sequence[socket.socket]) -> None:
        super().__init__()
        self.transport = ShardedTransport(NixlAgent(name, NixlOptions()), lines)
        self.memory: KVCacheMemory
        self.geometry: PoolGeometry

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        self.memory = memory
        self.geometry = PoolGeometry.of(memory, self.transport.register(memory), "nixl/push")

    def shutdown(self) -> None:
        self.transport.close()


class Node:
    def __init__(self, name: str, ranks: int, heads: int = HEADS) -> None:
        def halves(
            groups: Sequence[KVCacheGroup], lines: Sequence[socket.socket]
        ) -> tuple[SchedulerConnector, WorkerConnector]:
            self.moves = Registers(name, lines)
            return Plans(), self.moves

        config = config_of(ranks)
        self.handover = Handover(Connect(halves, fails=False), ranks, heads)
        self.handover.identity = "content"
        # By rank, as vLLM sees it: [layers, blocks, heads, tokens, bytes], all layers of a block side by side.
        self.caches = [
            torch.zeros(BLOCKS, LAYERS, max(1, HEADS // ranks), TOKENS, BYTES, dtype=torch.int8) for _ in range(ranks)
        ]
        if ranks == 1:
            self.handover.begin(config)
            self.handover.register(self.caches[0][:, 0])
            return
        for rank in reversed(range(ranks)):
            part = RankHandover(self.handover.key, config, RankOf(rank, ranks, heads))
            part.register(self.caches[rank][:, 0])
        self.handover.begin(config)

    def block(self, number: int) -> torch.Tensor:
        """[layers, heads, tokens, bytes]"""
        return torch.cat([cache[number] for cache in self.caches], dim=1)

    def write(self, number: int, values: torch.Tensor) -> None:
        for cache, part in zip(self.caches, values.chunk(len(self.caches), dim=1), strict=True):
            cache[number] = part

    def sums(self, block: int, mapping: Mapping) -> list[int]:
        return CacheChecksums(self.moves.memory, self.moves.transport.sums_elsewhere).of([block], [0], mapping)


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    made = [Node(f"node-{number}", ranks) for number, ranks in enumerate(request.param)]
    yield made
    for node in made:
        node.handover.close()


@pytest.mark.parametrize("nodes", [(2, 2), (2, 1), (1, 2), (4, 2), (1, 1)], indirect=True, ids=str)
def test_blocks_go_from_some_ranks_to_others(nodes: list[Node]) -> None:
    here, there = nodes
    values = torch.randint(-128, 127, (LAYERS, HEADS, TOKENS, BYTES), dtype=torch.int8)
    here.write(3, values)
    found = here.moves.geometry.mapping_to(there.moves.geometry.fingerprint, there.moves.geometry.memory)
    assert isinstance(found, Mapping), found
    transport = here.moves.transport
    remote = transport.connect(there.moves.geometry.memory)
    handle = transport.post(remote, found.move(Operation.WRITE, "t", [GrainPlace(3, 0, 2, 0)]))
    until = time.monotonic() + 20
    while not transport.is_done(handle):
        assert time.monotonic() < until
    assert torch.equal(there.block(2), values)
    assert not there.block(1).any()
    assert not there.block(3).any()
    assert here.sums(3, found) == there.sums(2, found)
    there.caches[-1][2, 0, 0, 0, 0] += 1
    assert here.sums(3, found) != there.sums(2, found)


def test_where_vllm_alone_knows_what_lies_where_both_sides_have_as_many_ranks() -> None:
    made = [Node("a", 2, heads=0), Node("b", 2, heads=0), Node("c", 1, heads=0)]
    try:
        here, alike, other = (node.moves.geometry for node in made)
        assert isinstance(here.mapping_to(alike.fingerprint, alike.memory), Mapping)
        refused = here.mapping_to(other.fingerprint, other.memory)
        assert isinstance(refused, str)
        assert "num_kv_heads is 2 here and 1 there" in refused
    finally:
        for node in made:
            node.handover.close()


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("BLNHC", (BLOCKS, HEADS, TOKENS, BYTES)), ("BLHNC", (BLOCKS * 2, HEADS, TOKENS // 2, BYTES))],
    ids=["tokens before heads", "blocks split for a kernel"],
)
def test_a_block_whose_heads_do_not_each_lie_in_one_piece_is_moved_whole(layout: str, shape: tuple[int, ...]) -> None:
    allocation = torch.zeros(BLOCKS * LAYERS * HEADS * TOKENS * BYTES, dtype=torch.int8)
    cache = allocation[: math.prod(shape)].view(shape)
    memory = VllmCache(config_of(1, layout)).memory(cache, "content", 9, RankOf(heads=HEADS))
    assert (memory.all_heads, memory.slots) == (1, 1)


def test_lines_come_in_the_order_of_ranks_and_strangers_get_none() -> None:
    door = RanksDoor("order", 2)
    opened = []
    for number in (7, 1, 1, -1, 0):
        opened.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        opened[-1].connect("\0tandem-ranks-order")
        opened[-1].sendall(struct.pack("<i", number))
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lines = door.lines()
    for line, number in zip(lines, b"\0\1", strict=True):
        line.sendall(bytes([number]))
    assert (opened[4].recv(1), opened[1].recv(1)) == (b"\0", b"\1")
    assert [opened[place].recv(1) for place in (0, 2, 3)] == [b"", b"", b""]
    for each in (*lines, *opened, silent):
        each.close()


def test_a_rank_that_opens_no_line_is_an_error_and_no_hang() -> None:
    door = RanksDoor("missing", 2, patience_s=0.01)
    with pytest.raises(InternalError, match="0 of vLLM's 2 ranks opened a line"):
        door.lines()
    door.close()


def made(tensor: int = 1, others: int = 1, **fields: Any) -> Any:
    parallel = {
        "world_size": tensor * others, "tensor_parallel_size": tensor, "decode_context_parallel_size": 1, "nnodes": 1,
        "distributed_executor_backend": "mp", **fields,
    }  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(async_scheduling=fields.get("async_scheduling", False)),
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (made(2, 2), "set tensor_parallel_size alone"),
        (made(2, decode_context_parallel_size=2), "set tensor_parallel_size alone"),
        (made(2, distributed_executor_backend="ray"), "set distributed_executor_backend to mp"),
        (made(2, nnodes=2), "set distributed_executor_backend to mp"),
        (made(2, async_scheduling=True), r"set model\.engine_args to \{async_scheduling: false\}"),
    ],
)
def test_ranks_that_hand_nothing_over_are_refused_with_what_would_be_right(config: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_ranks(config)


def test_ranks_that_share_heads_are_taken() -> None:
    check_ranks(made(2))
    check_ranks(made(1, distributed_executor_backend="uni", async_scheduling=True))
