"""What a router's decision costs by the number of nodes, and what tracking their caches costs.

    python -m benchmarks.routing [--nodes N,N,...] [--requests N] [--json FILE]

Cost: the router's own code (`tandem.router.policy.choose`, `tandem.router.pool`) chooses two nodes for each request, records what was sent and
answered, and reads the nodes' statuses; half of the requests share a prefix with earlier ones. There are no sockets. Hashing a prompt is timed
separately, because it happens with tokenizing, outside the event loop. Index: the messages in which nodes report the blocks that they store and
evict, and what recording them adds to a node's step.
"""

from __future__ import annotations

import random
import time
from collections import deque
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.lib.engines import greedy, request_of
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.tables import table_of
from tandem.base.percentile import percentile
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.hashing import make_block_hasher
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.cache.pool import CacheEvents
from tandem.engine.config import HashAlgorithm
from tandem.router.config import Heartbeat, LocalPrefill, PolicyName
from tandem.router.policy.choose import Chooser
from tandem.router.policy.views import RoutingRequest, blocks_for
from tandem.router.pool import NodePool
from tandem.router.prefixes import CachedBlocks, NodeBits, PromptHashes
from tandem.wire.kv_events import DEVICE_MEDIUM
from tandem.wire.nodes import NodeInfo, NodeState, Role
from tandem.wire.requests import CacheChange, CacheNews, NodeCounters, NodeStatus

BLOCK = 16
APPLICATIONS = 50  # prompts with which many requests begin
BLOCKS = 40_000  # of each node
PROMPTS = (4_096, 100_000)
STEPS_PER_STATUS = 20
COUNTED_EVERY = 4  # a node's statuses have its counters once a second (`tandem.node.routers`)


_read_status = msgspec.msgpack.Decoder(NodeStatus).decode


def _as_it_comes(status: NodeStatus) -> NodeStatus:
    """The status as a router has read it from a message: with numbers and names of its own."""
    return _read_status(msgspec.msgpack.encode(status))


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(50_000) for _ in range(count))


class Cluster:
    """Nodes that report what they would at a load of about one half."""

    def __init__(self, nodes: int) -> None:
        self._rng = random.Random(nodes)
        self.now = 0.0
        self.pool = NodePool("m", Heartbeat(), lambda: self.now, lambda node, why: None, lambda: None)
        self.chooser = Chooser(self.pool, PolicyName.LEAST_WAIT, LocalPrefill.AUTO)
        roles = [Role.PREFILL if index % 3 == 0 else Role.DECODE for index in range(nodes)]
        self.nodes = [
            NodeInfo(f"{role.value}-{index}", role, 1, f"tcp://10.0.0.1:{index}", "", "m", 1 << 20, BLOCK)
            for index, role in enumerate(roles)
        ]
        self.pool.set_members(self.nodes)
        self._running = {node.node_id: self._rng.randint(0, 40) for node in self.nodes}
        self._steps = dict.fromkeys((node.node_id for node in self.nodes), 0)
        self._step_s = dict.fromkeys((node.node_id for node in self.nodes), 0.0)  # the sum over a node's steps
        for _ in range(3):
            self.report(self.statuses(len(self.nodes)))
        self._applications = [words(self._rng, self._rng.randint(500, 4000)) for _ in range(APPLICATIONS)]
        self._asked = 0

    def statuses(self, count: int) -> list[NodeStatus]:
        rng, statuses = self._rng, []
        for node in rng.sample(self.nodes, count):
            self._steps[node.node_id] += STEPS_PER_STATUS
            self._step_s[node.node_id] += STEPS_PER_STATUS * rng.uniform(0.018, 0.022)
            steps, is_prefill = self._steps[node.node_id], node.role is Role.PREFILL
            counters = NodeCounters(
                prompt_tokens_computed=400 * steps if is_prefill else 0,
                steps=steps,
                step_seconds=self._step_s[node.node_id],
                decode_steps=0 if is_prefill else steps,
                decode_seconds=0.0 if is_prefill else self._step_s[node.node_id],
            )
            waiting = rng.choice((0, 0, 1, 2)) if is_prefill else 0
            running = self._running[node.node_id] = max(0, self._running[node.node_id] + rng.randint(-2, 2))
            is_counted = (
                steps // STEPS_PER_STATUS % COUNTED_EVERY == int(node.node_id.rpartition("-")[2]) % COUNTED_EVERY
            )
            statuses.append(
                _as_it_comes(NodeStatus(
                    node.node_id, node.role, 1, NodeState.READY, BLOCKS - 900 * running - rng.randint(0, 500), BLOCKS,
                    running, waiting, waiting * rng.randint(100, 4000), 0, 0, 0.0,
                    counters if is_counted else None,
                ))
            )  # fmt: skip
        return statuses

    def report(self, statuses: list[NodeStatus]) -> float:
        """Returns the CPU seconds for all of the statuses."""
        began = time.thread_time()
        for status in statuses:
            self.pool.on_status(status)
        return time.thread_time() - began

    def prompt(self, tokens: int) -> tuple[int, ...]:
        rng = self._rng
        start = rng.choice(self._applications) if rng.random() < 0.5 else ()
        return (*start, *words(rng, tokens))[:tokens]

    def decide(self, hashes: PromptHashes, tokens: int) -> float:
        """Returns the CPU seconds for a request's whole placement."""
        self._asked += 1
        name = f"r{self._asked}"
        began = time.thread_time()
        self.pool.view.has_room(tokens + 256, 0)
        decision = self.chooser.choose(RoutingRequest(tokens, 256), hashes)
        for node in (decision.prefill, decision.decode):
            if node is not None:
                self.pool.sent(node.node_id, name, tokens, blocks_for(tokens, node))
        for node in (decision.prefill, decision.decode):
            if node is not None:
                self.pool.answered(node.node_id, name)
        return time.thread_time() - began


def cost(nodes: int, tokens: int, requests: int) -> dict[str, Any]:
    cluster = Cluster(nodes)
    hashing, deciding, reading, read = [], [], 0.0, 0
    for number in range(requests):
        cluster.now += 0.01
        hashes = PromptHashes(list(cluster.prompt(tokens)), None)
        began = time.thread_time()
        hashes.of(BLOCK)
        hashing.append(time.thread_time() - began)
        statuses = cluster.statuses(min(nodes, 50))
        reading += cluster.report(statuses)
        read += len(statuses)
        seconds = cluster.decide(hashes, tokens)
        if number >= requests // 10:
            deciding.append(seconds)
    deciding.sort()
    return {
        "nodes": nodes,
        "prompt_tokens": tokens,
        "decision_ms_p50": percentile(deciding, 50) * 1e3,
        "decision_ms_p99": percentile(deciding, 99) * 1e3,
        "status_us": reading / read * 1e6,
        "hashing_ns_per_token": fmean(hashing) / tokens * 1e9,
    }


def index(nodes: int, blocks: int) -> dict[str, Any]:
    """Every node stores runs of 32 blocks, and evicts as many when it is full, as real nodes do."""
    rng = random.Random(1)
    cached = CachedBlocks(NodeBits(), 10**7)
    full = blocks // nodes // 2
    held: list[deque[bytes]] = [deque() for _ in range(nodes)]
    news = [CacheNews(f"n{index}", 1, 0, []) for index in range(nodes)]
    numbers = [1] * nodes
    for _ in range(blocks // 32):
        node = rng.randrange(nodes)
        run = rng.randbytes(32 * 8)
        changes = [CacheChange(DEVICE_MEDIUM, True, run)]
        held[node].append(run)
        if len(held[node]) * 32 > full:
            changes.append(CacheChange(DEVICE_MEDIUM, False, held[node].popleft()))
        news.append(CacheNews(f"n{node}", 1, numbers[node], changes))
        numbers[node] += 1
    frames = [msgspec.msgpack.encode(each) for each in news]
    decoder = msgspec.msgpack.Decoder(CacheNews)
    told = sum(len(change.hashes) // 8 for each in news for change in each.changes)
    del news
    began = time.thread_time()
    for frame in frames:
        cached.on_news(decoder.decode(frame))
    return {"nodes": nodes, "block_events_per_s": told / (time.thread_time() - began), "blocks_known": cached.count}


def step(tokens: int, requests: int) -> dict[str, Any]:
    """Returns what recording one step's events costs, by the tokens that each of its requests computes."""
    hasher = make_block_hasher(HashAlgorithm.SHA256, BLOCK, "seed")

    def once(tells: bool) -> float:
        groups = [KVCacheGroup(AttentionKind.FULL, BLOCK, (0,))]
        blocks = requests * (tokens // BLOCK + 3)
        cache = KVCacheManager(groups, blocks, caching=True, max_model_len=1 << 20, max_new_tokens=tokens)
        cache.pool.events = CacheEvents(1) if tells else None
        rng = random.Random(1)
        asked = [request_of(f"r{i}", list(words(rng, tokens)), greedy(9), hasher=hasher) for i in range(requests)]
        began = time.thread_time()
        for request in asked:
            cache.allocate_slots(request, tokens, hits=[[]])
        if cache.pool.events is not None:
            cache.pool.events.take()
        return time.thread_time() - began

    extra = min(once(True) for _ in range(5)) - min(once(False) for _ in range(5))
    return {"requests": requests, "tokens_each": tokens, "noting_events_us": extra * 1e6}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", default="4,100,1000,4000", help="how many, each in turn")
    parser.add_argument("--requests", type=int, default=1000, help="decisions of each kind")
    options = parser.parse_args()
    nodes = [int(count) for count in options.nodes.split(",")]
    found = {
        "What one request's decision costs the event loop": [
            cost(count, tokens, options.requests) for tokens in PROMPTS for count in nodes
        ],
        "What nodes tell of their caches, read by one router": [index(count, 1_000_000) for count in nodes],
        "What a node's step pays to tell it": [step(2048, 1), step(16, 16), step(16, 256)],
    }
    return report(options, found, *(table_of(title, rows) for title, rows in found.items() if rows), width=150)


if __name__ == "__main__":
    run(main)
