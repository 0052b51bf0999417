"""Pools of nodes in simulated time, and traffic for them: what `benchmarks.routing` measures the quality of decisions with.

The router's own code decides (`tandem.router.policy.choose`) on reports of simulated nodes that are a quarter of a second old, as in reality. Nodes
are simple: a prefill node computes prompts one after another at a fixed rate, without the part in its prefix cache; a decode node's step grows
with its requests. Nothing sleeps, because time is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from tandem.router.config import Heartbeat
from tandem.router.policy.choose import Chooser
from tandem.router.policy.views import RoutingDecision, RoutingRequest
from tandem.router.pool import NodePool
from tandem.router.prefixes import PromptHashes
from tandem.wire.nodes import NodeInfo, NodeState, Role
from tandem.wire.requests import NodeCounters, NodeStatus

BLOCK = 16
CACHE_BLOCKS = 3000
TOKENS_PER_S = 8000.0
STEP_S = 0.012
STEP_PER_REQUEST_S = 0.0006
STATUS_EVERY_S = 0.25


class SimulatedRequest(msgspec.Struct, frozen=True):
    at: float
    session: str
    prompt: tuple[int, ...]
    output: int


Trace = Callable[[random.Random, float, float], Iterator[SimulatedRequest]]


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(50_000) for _ in range(count))


def chats(rng: random.Random, seconds: float, load: float) -> Iterator[SimulatedRequest]:
    """Conversations: each turn begins with everything that was said before."""
    asks: list[SimulatedRequest] = []
    for number in itertools.count():
        at = number / (1.6 * load)
        if at > seconds:
            break
        history = words(rng, 200)
        for _ in range(rng.randint(2, 8)):
            history = (*history, *words(rng, rng.randint(50, 600)))
            answer = rng.randint(40, 300)
            asks.append(SimulatedRequest(at, f"chat-{number}", history, answer))
            history = (*history, *words(rng, answer))
            at += rng.uniform(4, 20)
    return iter(sorted(asks, key=lambda ask: ask.at))


def system_prompts(rng: random.Random, seconds: float, load: float) -> Iterator[SimulatedRequest]:
    """A few applications, each with a long prompt of its own before short questions; some are far more popular than others."""
    applications = [words(rng, rng.randint(800, 3000)) for _ in range(12)]
    weights = [1 / (rank + 1) for rank in range(len(applications))]
    at = 0.0
    for number in itertools.count():
        at += rng.expovariate(16 * load)
        if at > seconds:
            return
        (system,) = rng.choices(applications, weights)
        yield SimulatedRequest(at, f"user-{number}", (*system, *words(rng, rng.randint(20, 200))), rng.randint(20, 150))


def bursts(rng: random.Random, seconds: float, load: float) -> Iterator[SimulatedRequest]:
    """Unrelated prompts of very different lengths, alternately many and few at a time."""
    at = 0.0
    for number in itertools.count():
        busy = int(at / 5) % 3 == 0
        at += rng.expovariate((24 if busy else 4) * load)
        if at > seconds:
            return
        length = int(min(8000, rng.lognormvariate(6, 1.1)))
        yield SimulatedRequest(at, f"job-{number}", words(rng, max(16, length)), rng.randint(20, 200))


TRACES: dict[str, Trace] = {"chats": chats, "system prompts": system_prompts, "bursts": bursts}


class SimulatedNode:
    def __init__(self, node_id: str, role: Role) -> None:
        self.info = NodeInfo(node_id, role, 1, f"tcp://{node_id}", "", "m", 1 << 20, BLOCK)
        self.free_at = 0.0
        self.busy_s = 0.0
        self.running = 0
        self.waiting = 0
        self.computed = 0
        self.waiting_tokens = 0
        self._cache: OrderedDict[int, None] = OrderedDict()

    def cached_blocks(self, hashes: list[int]) -> int:
        for count, value in enumerate(hashes):
            if value not in self._cache:
                return count
        return len(hashes)

    def remember(self, hashes: list[int]) -> None:
        for value in hashes:
            self._cache[value] = None
            self._cache.move_to_end(value)
        while len(self._cache) > CACHE_BLOCKS:
            self._cache.popitem(last=False)

    def status(self) -> NodeStatus:
        steps = int(self.busy_s / STEP_S)
        counters = NodeCounters(
            prompt_tokens_computed=self.computed,
            steps=steps,
            step_seconds=self.busy_s,
            decode_steps=steps,
            decode_seconds=self.busy_s,
        )
        return NodeStatus(
            self.info.node_id, self.info.role, 1, NodeState.READY, 10**6, CACHE_BLOCKS, self.running, self.waiting,
            self.waiting_tokens, 0, 0, 0.0, counters,
        )  # fmt: skip


class PolicyOutcome(msgspec.Struct):
    first_token_s: list[float] = []
    per_token_s: list[float] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Simulation:
    def __init__(
        self,
        chooser_of: Callable[[NodePool], Chooser],
        prefill_nodes: int,
        decode_nodes: int,
        routers: int = 1,  # which take requests in turn
        telling_s: float
        | None = None,  # how long a message to another router takes; None: routers only hear nodes' statuses
    ) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        pools = [
            NodePool("m", Heartbeat(), lambda: self.now, lambda node, why: None, lambda: None) for _ in range(routers)
        ]
        self._routers = [(pool, chooser_of(pool)) for pool in pools]
        self._telling_s = telling_s
        self._asked = 0
        self.outcome = PolicyOutcome()
        self.nodes = {
            node_id: SimulatedNode(node_id, role)
            for role, count in ((Role.PREFILL, prefill_nodes), (Role.DECODE, decode_nodes))
            for node_id in (f"{role.value[0]}{index}" for index in range(count))
        }
        for pool, _ in self._routers:
            pool.set_members([node.info for node in self.nodes.values()])

    def _later(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), what))

    @property
    def imbalance(self) -> float:
        """The busiest prefill node's work over the mean."""
        busy = [node.busy_s for node in self.nodes.values() if node.info.role is Role.PREFILL]
        return max(busy) / statistics.mean(busy)

    def run(self, asks: Iterator[SimulatedRequest]) -> PolicyOutcome:
        for ask in asks:
            self._later(ask.at, lambda ask=ask: self._arrive(ask))  # type: ignore[misc]
        self._report()
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.outcome

    def _report(self) -> None:
        for node in self.nodes.values():
            for pool, _ in self._routers:
                pool.on_status(node.status())
        if self._events:
            self._later(self.now + STATUS_EVERY_S, self._report)

    def _arrive(self, ask: SimulatedRequest) -> None:
        self._asked += 1
        hashes = PromptHashes(ask.prompt, None)
        request = RoutingRequest(len(ask.prompt), ask.output, session=ask.session)
        pool, chooser = self._routers[self._asked % len(self._routers)]
        self._send(ask, hashes, chooser.choose(request, hashes), pool)

    def _send(self, ask: SimulatedRequest, hashes: PromptHashes, decision: RoutingDecision, pool: NodePool) -> None:
        if decision.prefill is None or decision.decode is None:
            raise AssertionError("the simulator knows prefill on prefill nodes only")
        prefill, decode = self.nodes[decision.prefill.node_id], self.nodes[decision.decode.node_id]
        blocks, name = hashes.of(BLOCK), f"{self._asked}"
        pool.sent(prefill.info.node_id, name, len(ask.prompt))
        pool.sent(decode.info.node_id, name, 0)
        if self._telling_s is not None:
            self._later(
                self.now + self._telling_s,
                lambda: self._tell(pool, name, hashes, {prefill.info: len(ask.prompt), decode.info: 0}),
            )
        decode.waiting += 1
        cached = BLOCK * prefill.cached_blocks(blocks)
        tokens = max(1, len(ask.prompt) - cached)
        took = tokens / TOKENS_PER_S
        prefill.remember(blocks)
        prefill.free_at = max(prefill.free_at, self.now) + took
        prefill.waiting_tokens += tokens
        self.outcome.prompt_tokens += len(ask.prompt)
        self.outcome.cached_tokens += cached

        def first_token() -> None:
            prefill.waiting_tokens -= tokens
            prefill.computed += tokens
            prefill.busy_s += took
            told = [other for other, _ in self._routers if other is pool or self._telling_s is not None]
            for each in told:
                each.answered(prefill.info.node_id, name)
                each.answered(decode.info.node_id, name)
            for other, chooser in self._routers:
                if other is not pool:  # cache news
                    chooser.answered(prefill.info, hashes, [])
            decode.waiting -= 1
            self.outcome.first_token_s.append(self.now - ask.at)
            decode.running += 1
            step = STEP_S + STEP_PER_REQUEST_S * decode.running
            self.outcome.per_token_s.append(step)
            self._later(self.now + ask.output * step, lambda: ended(ask.output * step))

        def ended(seconds: float) -> None:
            decode.running -= 1
            decode.busy_s += seconds
            for _, chooser in self._routers:
                chooser.answered(decode.info, hashes, [])

        self._later(prefill.free_at, first_token)

    def _tell(self, sender: NodePool, name: str, hashes: PromptHashes, sent: Mapping[NodeInfo, int]) -> None:
        for pool, chooser in self._routers:
            for node, tokens in sent.items() if pool is not sender else ():
                pool.sent(node.node_id, name, tokens)
                chooser.sent_elsewhere(node.node_id, chooser.marks_of(hashes, node.block_size))
