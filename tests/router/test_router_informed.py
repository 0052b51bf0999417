"""Routers learn from nodes what these have cached. The tests run whole nodes, with a model that computes nothing, over real sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.decode_node.node import DecodeRules
from tandem.engine.config import CacheConfig, EngineConfig
from tandem.kvtransfer.multi import create_connector
from tandem.node.config import NodeConfig
from tandem.node.engine_node import EngineNode
from tandem.router.prefixes import CachedBlocks, PromptHashes
from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import NodeInfo, Role
from tests.engine.engine_fakes import BLOCK_SIZE, FakeRunner
from tests.router.conftest import RunningRouter, StartRouter

NUM_BLOCKS = 40
PROMPT = "the quick brown fox jumps over the lazy dog and then it sleeps; " * 2


class WholeNode:
    def __init__(self, node_id: str, **cache: object) -> None:
        config = NodeConfig(
            node_id,
            Role.AGGREGATED,
            engine=EngineConfig(cache=CacheConfig(block_size=BLOCK_SIZE, **cache)),  # type: ignore[arg-type]
        )
        self.node = EngineNode(config, DecodeRules(Role.AGGREGATED), NumberedChannel, create_connector)
        self.info = self.node.start(runner=FakeRunner(NUM_BLOCKS))  # type: ignore[arg-type]

    def kill(self) -> None:
        self.node.stop()


StartNodes = Callable[..., RunningRouter]


@pytest.fixture
def start_nodes(start_router: StartRouter) -> StartNodes:
    def start(**cache: object) -> RunningRouter:
        router = start_router(prefill=0, decode=0)
        for name in ("a0", "a1"):
            router.nodes[name] = WholeNode(name, **cache)  # type: ignore[assignment]
        router.announce()
        router.wait_ready()
        return router

    return start


def router_of(start_router: StartRouter, *nodes: NodeInfo) -> RunningRouter:
    """Starts another router, which has only these nodes."""
    router = start_router(prefill=0, decode=0)
    router.look(lambda: router.server.set_members(list(nodes)))
    router.wait_ready(*(node.node_id for node in nodes))
    return router


def cached_of(router: RunningRouter) -> CachedBlocks:
    return router.server.services.dispatcher.placement.chooser.cached


def asked(router: RunningRouter, prompt: object = PROMPT) -> str:
    answer = router.complete(prompt=prompt, max_tokens=1)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-tandem-decision"])


def test_an_eviction_on_a_node_changes_the_next_requests_route(
    start_nodes: StartNodes, start_router: StartRouter
) -> None:
    """The router knows these caches from events alone, because other routers filled them."""
    router = start_nodes()
    tokens = router.server.services.model.tokenizer.encode(PROMPT, special=True)
    hashes, cached = PromptHashes(tokens, None).of(BLOCK_SIZE), cached_of(router)
    half = len(hashes) // 2
    of_first, of_second = (router_of(start_router, router.nodes[name].info) for name in ("a0", "a1"))
    asked(of_first, tokens)
    asked(of_second, tokens[: half * BLOCK_SIZE + 1])
    router.wait_for(
        lambda: [length for length, _ in cached.levels(hashes)] == [len(hashes), half], "it is told of both"
    )
    assert "a0" in asked(router, tokens)

    for start in (5, 6, 7):
        asked(of_first, [start, *range(50, 50 + (NUM_BLOCKS - 4) * BLOCK_SIZE)])
    router.wait_for(lambda: [length for length, _ in cached.levels(hashes)][:1] == [half], "it is told of the eviction")
    assert "a1" in asked(router, tokens)


def test_a_router_that_comes_later_is_told_everything(start_nodes: StartNodes, start_router: StartRouter) -> None:
    router = start_nodes()
    asked(router)
    router.wait_for(lambda: cached_of(router).count > 0, "the router is told")
    later = router_of(start_router, *(node.info for node in router.nodes.values()))
    later.wait_for(lambda: cached_of(later).count == cached_of(router).count, "the later one knows the same")


def test_nodes_that_do_not_tell_are_routed_to_by_what_was_sent(start_nodes: StartNodes) -> None:
    router = start_nodes(tell_routers=False)
    where = asked(router)
    name = "a0" if "a0" in where else "a1"
    assert cached_of(router).count == 0
    for _ in range(3):
        assert name in asked(router)


def test_what_a_node_had_cached_is_forgotten_with_it(start_nodes: StartNodes) -> None:
    router = start_nodes()
    asked(router)
    cached = cached_of(router)
    router.wait_for(lambda: cached.count > 0, "the router is told")
    router.look(lambda: router.server.set_members([]))
    assert cached.count == 0
