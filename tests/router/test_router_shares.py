"""Keys share the nodes by work: tokens computed, and KV held. All on a clock that jumps."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.dispatch.admission import Admission
from tandem.router.dispatch.expected_wait import DeadlineOutOfReach
from tandem.router.dispatch.slots import AskedPlaces, Slots
from tandem.router.metrics import RouterMetrics
from tandem.simulator.clock import VirtualLoop

READS_PER_S = 1000.0
CHUNK = 100


def on_virtual_time(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(scenario)
    def test(*args: Any, **kwargs: Any) -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(scenario(*args, **kwargs))
        finally:
            loop.close()

    return test


class Pool:
    """A router's admission, and nodes that read prompts one after the other, each READS_PER_S tokens."""

    def __init__(self, nodes: int = 1, places: int = 1000, weights: dict[str, float] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines: list[list[Sequence]] = [[] for _ in range(nodes)]
        self.queued = [0.0] * nodes
        self.reads: list[tuple[float, str, float]] = []  # when, whose, how many tokens were computed
        self.is_measured = True
        self.idle_s = 0.0  # a node had nothing to read although prompts waited
        self.tasks: list[asyncio.Task[None]] = []
        self.wakes = [asyncio.Event() for _ in range(nodes)]
        self.admission = Admission(
            lambda: places,
            10_000,
            1e6,
            self.loop.time,
            RouterMetrics(),
            lambda: None,
            readers=self,
            weight_of=lambda name: (weights or {}).get(name, 1.0),
        )
        self.tasks += [self.loop.create_task(self._read(node)) for node in range(nodes)]
        self.tasks.append(self.loop.create_task(self._report()))

    # --- as the router knows the nodes

    def line_wait_s(self) -> float:
        return min(self.queued) / READS_PER_S

    def read_tokens_per_s(self) -> float:
        return READS_PER_S * len(self.lines) if self.is_measured else 0.0

    def reading_s(self, tokens: float) -> float:
        return tokens / READS_PER_S

    # --- nodes and clients

    async def _report(self) -> None:
        """Nodes' statuses come."""
        while True:
            await asyncio.sleep(0.25)
            self.admission.on_pool_change()

    async def _read(self, node: int) -> None:
        while True:
            while not self.lines[node]:
                began = self.loop.time()
                self.wakes[node].clear()
                await self.wakes[node].wait()
                if self.admission.queued:
                    self.idle_s += self.loop.time() - began
            sequence = self.lines[node][0]
            step = min(CHUNK, sequence.left)
            await asyncio.sleep(step / READS_PER_S)
            self.reads.append((self.loop.time(), sequence.tenant, step))
            sequence.left -= step
            if sequence.left or sequence not in self.lines[node]:
                continue  # what is read of it is cached
            self.lines[node].remove(sequence)
            self.queued[node] -= sequence.tokens
            sequence.slots.read_one(int(sequence.computed))
            sequence.is_read = True
            sequence.read.set()

    async def ask(self, tenant: str, tokens: int, *, cached: float = 0.0, first_by: float | None = None) -> None:
        """One request with a prompt of so many tokens, and an answer of one."""
        asked = AskedPlaces(1, tokens, float(tokens), first_by=first_by)
        slots = await self.admission.acquire(tenant, asked, 1e6)
        sequence = Sequence(self, tenant, slots, tokens, tokens * (1.0 - cached))
        await sequence.read.wait()
        slots.release_one()

    def keep_asking(self, tenant: str, at_once: int, size: Callable[[], int], cached: float = 0.0) -> None:
        async def one() -> None:
            while True:
                await self.ask(tenant, size(), cached=cached)

        self.tasks += [self.loop.create_task(one()) for _ in range(at_once)]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def computed(self, tenant: str, begin: float, end: float) -> float:
        return sum(tokens for at, name, tokens in self.reads if name == tenant and begin < at <= end)


class Sequence:
    def __init__(self, pool: Pool, tenant: str, slots: Slots, tokens: int, computed: float) -> None:
        self.pool, self.tenant, self.slots = pool, tenant, slots
        self.tokens, self.computed, self.left = tokens, computed, computed
        self.read = asyncio.Event()
        self.is_read = False
        self.pauses = 0
        slots.listen(self.start, lambda error: None, self.give_way)
        self.start()

    def start(self) -> None:
        self.slots.begin_one()
        self.computed = self.left
        node = min(range(len(self.pool.lines)), key=self.pool.queued.__getitem__)
        self.pool.lines[node].append(self)
        self.pool.queued[node] += self.tokens
        self.pool.wakes[node].set()

    def give_way(self, unread: bool) -> bool:
        if self.is_read or not self.left:
            return False
        self.pauses += 1
        for node, line in enumerate(self.pool.lines):
            if self in line:
                line.remove(self)
                self.pool.queued[node] -= self.tokens
        self.slots.pause_one(unread=True)
        return True


@settings(max_examples=15)
@given(
    weights=st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=2, max_size=3),
    most=st.lists(st.integers(100, 900), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
@on_virtual_time
async def test_each_key_gets_its_part_of_what_is_computed(weights: list[float], most: list[int], seed: int) -> None:
    """In any window in which all wait, up to one of the largest requests of each."""
    rng = random.Random(seed)
    names = "abc"[: len(weights)]
    pool = Pool(weights=dict(zip(names, weights, strict=True)))
    for name, largest in zip(names, most, strict=False):
        # So many that it never has too few: a second's worth beyond what nodes have in advance.
        pool.keep_asking(name, 2 + 4000 // largest, functools.partial(rng.randint, 1, largest))
    await asyncio.sleep(12)
    await pool.end()
    assert pool.idle_s == 0.0
    # After what the first of them had sent while it was alone.
    for begin, end in [(4.0, 12.0), *(sorted(rng.sample(range(4, 13), 2)) for _ in range(5))]:
        for one, weight_1, most_1 in zip(names, weights, most, strict=False):
            for other, weight_2, most_2 in zip(names, weights, most, strict=False):
                apart = pool.computed(one, begin, end) / weight_1 - pool.computed(other, begin, end) / weight_2
                assert abs(apart) <= 2 * (most_1 / weight_1 + most_2 / weight_2)


@on_virtual_time
async def test_who_comes_beside_a_flood_gets_half_of_the_work_within_a_second() -> None:
    pool = Pool(nodes=2)
    pool.keep_asking("flood", 200, lambda: 400)
    await asyncio.sleep(5.01)
    assert pool.admission.queued == 0, "alone it has all places"
    assert pool.line_wait_s() > 30
    pool.keep_asking("other", 100, lambda: 20)
    await asyncio.sleep(10)
    await pool.end()
    for begin in (6.01, 8.0, 12.0):
        other, flood = (pool.computed(name, begin, begin + 2) for name in ("other", "flood"))
        assert other == pytest.approx(2000, abs=420)
        assert other + flood == pytest.approx(4000, abs=820)
    assert pool.idle_s == 0.0


@on_virtual_time
async def test_one_request_beside_a_flood_is_read_within_a_second() -> None:
    pool = Pool()
    pool.keep_asking("flood", 300, lambda: 100)
    await asyncio.sleep(3)
    for _ in range(5):
        began = pool.loop.time()
        await pool.ask("other", 20)
        assert pool.loop.time() - began < 1.0
        await asyncio.sleep(0.3)
    await asyncio.sleep(10)
    assert pool.line_wait_s() > 20, "alone again, it has everything"
    await pool.end()
    assert pool.idle_s == 0.0


@on_virtual_time
async def test_what_was_sent_before_a_rate_was_known_comes_back() -> None:
    pool = Pool()
    pool.is_measured = False
    pool.keep_asking("flood", 100, lambda: 500)
    await asyncio.sleep(0)
    asked = pool.loop.create_task(pool.ask("other", 20))
    await asyncio.sleep(2)
    assert pool.admission.queued == 0
    pool.is_measured = True
    began = pool.loop.time()
    await asked
    assert pool.loop.time() - began < 1.5
    await pool.end()


@on_virtual_time
async def test_what_is_found_in_a_cache_is_not_charged() -> None:
    pool = Pool()
    pool.keep_asking("new", 50, lambda: 100)
    pool.keep_asking("cached", 200, lambda: 100, cached=0.75)
    await asyncio.sleep(20)
    await pool.end()
    assert pool.computed("cached", 4, 20) == pytest.approx(pool.computed("new", 4, 20), rel=0.05)


@on_virtual_time
async def test_who_was_away_saves_no_credit() -> None:
    pool = Pool()
    pool.keep_asking("busy", 50, lambda: 100)
    await pool.ask("other", 100)
    await asyncio.sleep(60)
    pool.keep_asking("other", 50, lambda: 100)
    await asyncio.sleep(5)
    await pool.end()
    assert pool.computed("busy", 61.5, 64.5) == pytest.approx(1500, abs=200)


@on_virtual_time
async def test_long_answers_are_work_too() -> None:
    """One key's answers are charged as they come."""
    pool = Pool()
    talks = await pool.admission.acquire("talks", AskedPlaces(1, 10, 10.0), 1e6)
    talks.begin_one()
    talks.listen(lambda: None, lambda error: None, None, lambda: int(500 * pool.loop.time()))
    talks.read_one(10)
    pool.keep_asking("talks", 50, lambda: 100)
    pool.keep_asking("reads", 50, lambda: 100)
    await asyncio.sleep(10)
    await pool.end()
    # 500 tokens a second of its answers and 250 of its prompts, as many as the other's 750.
    assert pool.computed("reads", 3, 9) == pytest.approx(4500, abs=300)
    assert pool.computed("talks", 3, 9) == pytest.approx(1500, abs=300)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=2), weight=st.sampled_from([1.0, 0.5]))
@on_virtual_time
async def test_each_key_comes_to_its_part_of_the_kv(sizes: list[int], weight: float) -> None:
    """Up to one sequence of each, whatever their sizes are, and how many requests they make."""
    room = 400

    class Holder:
        def __init__(self, slots: Slots) -> None:
            self.slots, self.runs = slots, False
            slots.listen(self.start, lambda error: None, self.give_way)
            self.start()

        def start(self) -> None:
            self.slots.begin_one()
            held[self.slots.account.name] += self.slots.kv_tokens
            self.runs = True

        def give_way(self, unread: bool) -> bool:
            if not self.runs:
                return False
            self.runs = False
            held[self.slots.account.name] -= self.slots.kv_tokens
            self.slots.pause_one()
            return True

    held = {"greedy": 0, "other": 0}
    loop = asyncio.get_running_loop()
    admission = Admission(
        lambda: 10_000, 10_000, 1e6, loop.time, RouterMetrics(), lambda: None,
        lambda tokens, promised: promised + tokens + sum(held.values()) <= room,
        weight_of=lambda name: weight if name == "other" else 1.0,
    )  # fmt: skip
    holders: list[Holder] = []

    async def begin(name: str, size: int) -> None:
        holders.append(Holder(await admission.acquire(name, AskedPlaces(1, size), 1e6)))

    tasks = []
    for name, size in zip(held, sizes, strict=True):
        tasks += [loop.create_task(begin(name, size)) for _ in range(room // size + 2)]
        await asyncio.sleep(0)
    for _ in range(200):  # as nodes' statuses come
        await asyncio.sleep(0.3)
        admission.pump()
    greedy, other = held["greedy"], held["other"] / weight
    assert abs(greedy - other) <= 2 * (sizes[0] + sizes[1] / weight)
    assert greedy + held["other"] > room - 2 * max(sizes)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("places", [1, 2, 3, 5])
@on_virtual_time
async def test_places_are_shared_by_weight_however_few_there_are(places: int) -> None:
    pool = Pool(places=places, weights={"half": 0.5})
    pool.is_measured = False  # else reading is what they share
    pool.keep_asking("whole", 20, lambda: 100)
    pool.keep_asking("half", 20, lambda: 100)
    await asyncio.sleep(60)
    await pool.end()
    assert pool.computed("whole", 6, 60) == pytest.approx(2 * pool.computed("half", 6, 60), rel=0.05)


@on_virtual_time
async def test_what_is_due_first_goes_first_and_what_has_no_deadline_is_not_starved() -> None:
    pool = Pool(places=1)
    order: list[str] = []

    async def ask(name: str, first_by: float | None) -> None:
        await pool.ask("key", 100, first_by=first_by)
        order.append(name)

    first = pool.loop.create_task(ask("running", None))
    await asyncio.sleep(0)
    asked = [("none", None), ("late", 20.0), ("soon", 10.0), ("none too", None)]
    waiting = [pool.loop.create_task(ask(name, first_by)) for name, first_by in asked]
    await asyncio.gather(first, *waiting)
    assert order == ["running", "soon", "late", "none", "none too"]
    await pool.end()


@on_virtual_time
async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    pool = Pool()
    with pytest.raises(DeadlineOutOfReach, match=r"expected in 0\.8 s, of which 0\.8 s") as refusal:
        await pool.ask("key", 800, first_by=0.5)
    assert refusal.value.retry_after_s == 1
    pool.keep_asking("key", 40, lambda: 100)
    await asyncio.sleep(0.001)
    with pytest.raises(DeadlineOutOfReach, match=r"leaves 1\.0 s") as refusal:
        await pool.ask("key", 100, first_by=pool.loop.time() + 1.0)
    assert refusal.value.retry_after_s == 4
    await pool.ask("key", 100, first_by=pool.loop.time() + 30.0)
    await pool.end()


@on_virtual_time
async def test_a_deadline_that_passes_in_line_ends_the_wait() -> None:
    pool = Pool(places=1)
    running = await pool.admission.acquire("key", AskedPlaces(), 1e6)
    with pytest.raises(DeadlineOutOfReach, match="waited for 5 s of its X-Tandem-Deadline"):
        await pool.ask("key", 100, first_by=5.1)
    assert pool.loop.time() == pytest.approx(5.0)
    assert pool.admission.queued == 0
    running.release_all()
    await pool.end()
