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


KINDS = {  # and how much of a conversation's first turn, 70 tokens and an answer of 8, its tier has for the second
    "gemma3": 76,  # all of it, and the window before its end
    "mistral-window": 76,
    "llama4": 76,  # and the chunk that its end lies in
    "qwen3.5": 68,  # states are kept at the end of the prompt's last block
    "recurrent-gemma": 68,  # and a window
    "mamba2": 68,  # and nothing else
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model_of_kind(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(kind, tmp_path_factory.mktemp(kind))


def start(model: Path, name: str, factor: int = 1, *, shares: bool = True) -> OneEngine:
    return OneEngine.start(
        model,
        name,
        BLOCK,
        TransferConfig(connector="nixl"),
        memory_bytes=8 << 20,
        prefix_caching=True,
        checkpoint_tokens=BLOCK,
        tiers=[TierConfig(cpu=4 << 20, block_factor=factor)],
        shares=shares,
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


def test_of_a_model_with_several_groups_what_all_of_them_need_is_copied(
    kind: str, model_of_kind: Path
) -> None:
    nodes = a, b = start(model_of_kind, "a"), start(model_of_kind, "b")
    alone = start(model_of_kind, "alone", shares=False)
    try:
        turn = [*PROMPT, *a.answer("r", PROMPT, 8), 9, 8, 7]
        settle(nodes)
        expected = alone.answer("r", turn, 8)
        tokens: list[int] = []
        b.add("r", turn, 8, None, cache_peers=CachePeers(source=a.tier))
        go_on(nodes, "r", tokens)
        assert tokens == expected
        stats = b.engine.scheduler.stats()
        found = KINDS[kind]
        assert (stats.prompt_tokens_loaded, stats.prompt_tokens_computed) == (found, len(turn) - found)
        assert tier(b).fetched_bytes == tier(b).loaded_bytes > 0, "nothing is copied that is not of use"
        settle(nodes)
    finally:
        for node in (*nodes, alone):
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
