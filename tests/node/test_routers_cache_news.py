"""A node's cache news reaches a router's index, even over lines that lose messages: in the end the router knows what is cached."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import NodeLost
from tandem.engine.cache.pool import CacheEvents
from tandem.engine.request import Request
from tandem.node.routers import CacheNewsSender, NamedBlocks
from tandem.router.prefixes import CachedBlocks, NodeBits, PromptHashes
from tandem.wire.images import MediaFeature
from tandem.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tandem.wire.requests import CacheChange, CacheNews, ListCache
from tests.engine.cache.tables import BLOCK, FULL, admit, manager, request
from tests.engine.made_requests import made_request
from tests.wire.test_lines import World


class Pair:
    """A node's cache, and a router that follows its news."""

    def __init__(self, **limits: int) -> None:
        self.world = World(**limits)
        self.cache = manager(FULL, num_blocks=24)
        self.cache.pool.events = CacheEvents(1)
        self.sender = CacheNewsSender("n", 22, NamedBlocks(BLOCK), self._tell)
        self.blocks = CachedBlocks(NodeBits(), 10**6)
        self.world.router.deliver = self._to_router  # type: ignore[method-assign]
        self.world.node.deliver = self._to_node  # type: ignore[method-assign]
        self.world.node.on_begun = self._begin  # type: ignore[method-assign]
        self._begin("router")
        self.prompts: list[list[int]] = []

    def _tell(self, reply_to: str, news: CacheNews) -> None:
        with contextlib.suppress(NodeLost):
            self.world.node.lines.send(reply_to, news)

    def _begin(self, reply_to: str) -> None:
        self.sender.begin(reply_to)
        self.sender.turn()

    def _to_node(self, message: object) -> None:
        if isinstance(message, ListCache):
            self._begin("router")

    def _to_router(self, message: object) -> None:
        if isinstance(message, CacheNews) and not self.blocks.on_news(message):
            self.world.router.lines.send("node", ListCache("router"))

    def tell(self) -> None:
        assert self.cache.pool.events is not None
        if events := self.cache.pool.events.take():
            self.sender.happened(events)
            self.sender.turn()

    def check(self) -> None:
        """For every prompt so far, the router's index must say what the node would find in its cache."""
        assert self.blocks.knows("n")
        for prompt in self.prompts:
            found = len(self.cache.pool.lookup_run(0, request("x", prompt).block_hashes))
            levels = self.blocks.levels(PromptHashes(prompt, None).of(BLOCK))
            assert [blocks for blocks, _ in levels] == ([found] if found else [])
        assert self.blocks.count == len(self.cache.pool.cached[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 0.4), st.sampled_from([4, 50_000]))
def test_after_any_loss_replay_and_restart_the_router_knows_the_truth(
    seed: int, loss: float, replay_frames: int
) -> None:
    rng = random.Random(seed)
    pair = Pair(replay_frames=replay_frames)
    world, cache = pair.world, pair.cache
    world.fate = lambda: [] if rng.random() < loss else [rng.expovariate(20.0)] * (1 + (rng.random() < 0.1))
    running: list[Request] = []
    for number in range(25):
        what = rng.choice(["ask", "ask", "end", "run", "cut", "heal", "router forgets", "node forgets", "reset"])
        if what == "ask":
            start = rng.choice(pair.prompts)[: 4 * rng.randint(0, 6)] if pair.prompts else []
            prompt = [*start, *(rng.randrange(100) for _ in range(rng.randint(1, 20)))]
            each = request(f"r{number}", prompt)
            if admit(cache, each) is not None:
                running.append(each)
                pair.prompts.append(prompt)
        elif what == "end" and running:
            cache.free(running.pop())
        elif what == "run":
            world.run(rng.random(), beats=True)
        elif what == "cut":
            world.cut.add(rng.choice(["router", "node"]))
        elif what == "heal":
            world.cut.clear()
        elif what == "router forgets":
            pair.blocks.forget("n")
            world.router.lines.begin_anew("node")
        elif what == "node forgets":
            world.node.lines.forget("router")
            pair.sender.forget("router")
        elif what == "reset" and not running:
            cache.reset_prefix_cache()
        pair.tell()
    world.cut.clear()
    world.fate = lambda: [0.001]
    world.run(8.0, beats=True)
    pair.check()


def test_the_router_and_the_node_name_blocks_alike_with_salts_and_adapters_apart() -> None:
    cached = NamedBlocks(2)
    stored = BlockStored([b"a", b"b"], None, [1, 2, 3, 4], 2, extra_keys=[("salt:s",), None])
    ((_, _, names),) = cached.apply(stored)
    assert names == PromptHashes([1, 2, 3, 4, 5], "s").of(2)
    ((_, _, other),) = cached.apply(BlockStored([b"c"], None, [1, 2], 2, lora_name="x", extra_keys=[("lora:x",)]))
    assert other != names[:1]
    media = BlockStored([b"d"], b"b", [5, 6], 2, extra_keys=[("media:m:4",)])
    ((_, _, with_media),) = cached.apply(media)
    assert with_media != PromptHashes([1, 2, 3, 4, 5, 6], "s").of(2)[2:]


@given(st.integers(0, 9), st.integers(1, 6), st.integers(0, 5))
def test_the_router_and_the_node_name_blocks_with_images_alike(offset: int, length: int, answered: int) -> None:
    media = [MediaFeature("m/0", offset, length), MediaFeature("m/1", offset + length + 1, 2)]
    tokens = [7] * (offset + length + 6 + answered)
    events = CacheEvents(1)
    each = made_request("r", tokens, media=media)
    hashes = [bytes([place]) for place in range(len(tokens) // BLOCK)]
    if not hashes:
        return
    events.stored(each, 0, BLOCK, range(len(hashes)), hashes, None)
    ((_, _, names),) = NamedBlocks(BLOCK).apply(events.take()[0])
    prompt = PromptHashes(tokens[: len(tokens) - answered], None, None, media)
    assert prompt.with_output(BLOCK, tokens[len(tokens) - answered :]) == names
    assert names[: len(prompt.of(BLOCK))] == prompt.of(BLOCK)


def test_a_block_that_left_the_device_is_known_as_long_as_a_tier_has_it() -> None:
    cached, blocks = NamedBlocks(2), CachedBlocks(NodeBits(), 100)
    told: list[CacheNews] = []
    sender = CacheNewsSender("n", 1, cached, lambda reply_to, news: told.append(news))
    sender.begin("r")
    sender.turn()
    hashes = PromptHashes([1, 2, 3, 4], None).of(2)
    for events in (
        [BlockStored([b"a", b"b"], None, [1, 2, 3, 4], 2)],
        [BlockStored([b"a", b"b"], None, [], 2, medium="CPU")],
        [BlockRemoved([b"b", b"a"])],
    ):
        sender.happened(events)
        sender.turn()
    for news in told:
        assert blocks.on_news(news)
    assert [length for length, _ in blocks.levels(hashes)] == [2]
    assert blocks.in_tier("n", hashes) == (2, "CPU")
    assert blocks.in_tier("n", hashes[:0]) == (0, "")
    sender.happened([AllBlocksCleared()])
    sender.turn()
    assert blocks.on_news(told[-1])
    assert blocks.levels(hashes) == []
    assert blocks.count == 0


def test_a_publisher_that_fails_loses_nothing_for_routers(caplog: pytest.LogCaptureFixture) -> None:
    told: list[CacheNews] = []
    published: list[object] = []
    broken = True

    def publish(events: Sequence[KVEvent]) -> None:
        if broken:
            raise RuntimeError("no room for a message")
        published.extend(events)

    blocks = CachedBlocks(NodeBits(), 100)
    sender = CacheNewsSender("n", 1, NamedBlocks(2), lambda reply_to, news: told.append(news), [publish])
    sender.begin("r")
    sender.turn()
    hashes = PromptHashes([1, 2, 3, 4], None).of(2)
    sender.happened([BlockStored([b"a", b"b"], None, [1, 2, 3, 4], 2)])
    sender.happened([BlockRemoved([b"b"])])  # in the same turn, behind what failed
    sender.turn()
    for news in told:
        assert blocks.on_news(news)
    assert [length for length, _ in blocks.levels(hashes)] == [1]
    assert caplog.text.count("KV events are not published") == 1, "it is not said with every step"
    broken = False
    sender.happened([BlockRemoved([b"a"])])
    sender.turn()
    assert blocks.on_news(told[-1])
    assert blocks.levels(hashes) == []
    assert published == [BlockRemoved([b"a"])]
    sender.begin("another")  # the list that a new router gets is true, too
    sender.turn()
    assert told[-1].changes == []


def test_a_group_of_blocks_that_slide_is_not_told() -> None:
    cached = NamedBlocks(2, group=1)
    assert cached.apply(BlockStored([b"a"], None, [1, 2], 2, group_idx=0)) == []
    ((_, _, names),) = cached.apply(BlockStored([b"a"], None, [1, 2], 2, group_idx=1))
    assert len(names) == 1
    assert cached.apply(BlockRemoved([b"a"], group_idx=0)) == []


def test_of_a_cache_that_does_not_fit_nothing_is_known_and_the_others_stay() -> None:
    blocks = CachedBlocks(NodeBits(), 3)
    small, large = PromptHashes([1, 2], None).of(1), PromptHashes([5, 6, 7], None).of(1)
    for name, hashes in (("small", small), ("large", large)):
        assert blocks.on_news(CacheNews(name, 1, 0, []))
        assert blocks.on_news(CacheNews(name, 1, 1, [CacheChange("GPU", True, array("Q", hashes).tobytes())]))
    assert (blocks.knows("small"), blocks.knows("large")) == (True, False)
    assert blocks.count == 2
    assert blocks.levels(large) == []
    assert blocks.on_news(CacheNews("large", 1, 2, [CacheChange("GPU", False, array("Q", large).tobytes())]))
    assert blocks.count == 2
