"""Nodes that read each other's tiers in host memory, over NIXL: a prefix that another node has, and a request that another goes on
with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.wire.requests import CachePeers, TierStatus
from tests.engine.model.tiny import save
from tests.integration.one_engine import PATIENCE_S, OneEngine

BLOCK = 4
PROMPT = [3 + 7 * i % 120 for i in range(70)]
FULL = 68  # tokens of its full blocks
COUNT = 120  # of an answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("model"))


def start(model: Path, name: str, factor: int = 1) -> OneEngine:
    return OneEngine.start(
        model,
        name,
        BLOCK,
        TransferConfig(connector="nixl"),
        memory_bytes=8 << 20,
        prefix_caching=True,
        tiers=[TierConfig(cpu=4 << 20, block_factor=factor)],
        shares=True,
    )


@pytest.fixture
def nodes(model: Path) -> Iterator[tuple[OneEngine, OneEngine]]:
    pair = start(model, "a"), start(model, "b")
    yield pair
    for node in pair:
        node.engine.shutdown()


def tier(node: OneEngine) -> TierStatus:
    (status,) = node.stats().tiers
    return status


def go_on(nodes: tuple[OneEngine, OneEngine], name: str, tokens: list[int]) -> None:
    """Both step until the request at the second has ended."""
    until = time.monotonic() + PATIENCE_S
    first, second = nodes
    while not second.run(name, tokens, until):
        first.run("nothing", [], until)


@pytest.mark.parametrize("factor", [1, 4])
def test_a_prefix_that_another_node_has_is_copied_and_not_computed(model: Path, factor: int) -> None:
    nodes = a, b = start(model, "a", factor), start(model, "b", factor)
    try:
        expected = a.answer("r", PROMPT, 8)
        tokens: list[int] = []
        b.add("r", PROMPT, 8, None, cache_peers=CachePeers(source=a.tier))
        go_on(nodes, "r", tokens)
        assert tokens == expected
        stats = b.engine.scheduler.stats()
        copied = FULL // (BLOCK * factor) * BLOCK * factor
        assert (stats.prompt_tokens_loaded, stats.prompt_tokens_computed) == (copied, 70 - copied)
        assert tier(b).fetched_bytes == copied // BLOCK * a.engine.runner.kv_cache[0].nbytes
        settle(nodes)
    finally:
        for node in nodes:
            node.engine.shutdown()


def test_a_node_that_does_not_answer_is_not_waited_for(nodes: tuple[OneEngine, OneEngine]) -> None:
    a, b = nodes
    expected = a.answer("r", PROMPT, 8)
    tokens: list[int] = []
    b.add("r", PROMPT, 8, None, cache_peers=CachePeers(source=a.tier))
    until = time.monotonic() + PATIENCE_S
    while not b.run("r", tokens, until):  # the other does not step
        pass
    assert tokens == expected
    assert b.engine.scheduler.stats().prompt_tokens_computed == 70
    settle(nodes)


def test_a_mirror_goes_on_with_all_but_the_last_blocks_of_a_request(
    nodes: tuple[OneEngine, OneEngine],
) -> None:
    a, b = nodes
    block_bytes = a.engine.runner.kv_cache[0].nbytes
    expected = a.answer("whole", PROMPT, COUNT)
    said: list[int] = []
    a.add("r", PROMPT, COUNT, None, cache_peers=CachePeers(mirror=b.tier))
    until = time.monotonic() + PATIENCE_S
    while len(said) < 30 or tier(b).mirrored_bytes < ((70 + len(said)) // BLOCK - 2) * block_bytes:
        assert not a.run("r", said, until), "the mirror never came near"
        b.run("nothing", [], until)
    a.engine.shutdown()
    tokens: list[int] = []
    b.add("r", PROMPT, COUNT, None, output=said)
    while not b.run("r", tokens, until):
        pass
    assert said + tokens == expected
    assert b.engine.scheduler.stats().prompt_tokens_loaded == 70, "nothing of the prompt was computed again"
    assert tier(b).loaded_bytes >= ((70 + len(said)) // BLOCK - 2) * block_bytes


def settle(nodes: tuple[OneEngine, OneEngine]) -> None:
    """Nothing is waited for, and nothing kept for anyone."""
    until = time.monotonic() + PATIENCE_S
    for node in nodes:
        planner = node.engine.scheduler._state.connector
        (part,) = [p for p in planner._parts if isinstance(p, TierScheduler)]  # type: ignore[union-attr]
        sharing = part._tier.sharing
        assert sharing is not None
        while sharing._leases or sharing._fetches or node.engine.scheduler.stats().held_blocks:
            for other in nodes:
                other.run("the end of copies", [], until)
        part._tier.manager.check_integrity()  # type: ignore[attr-defined]
