from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DeadlineExceeded
from tandem.router.dispatch.admission import MOST_PASSED_OVER, Admission
from tandem.router.dispatch.expected_wait import QueueFull
from tandem.router.dispatch.slots import AskedPlaces, Slots
from tandem.router.metrics import RouterMetrics
from tests.loops import in_loop

SOON = 5.0


class Place:
    """An admission with `capacity` places, on its own event loop. `tokens`: it also counts KV tokens."""

    def __init__(
        self, capacity: int, queued: int = 10, timeout_s: float = SOON, *, tokens: int | None = None, **options: Any
    ) -> None:
        self.capacity = capacity
        self.free = tokens
        self.wait_at_nodes = 0.0
        self.clock = asyncio.get_running_loop().time
        self.released = 0
        self.metrics = RouterMetrics()
        self.admission = Admission(
            lambda: self.capacity,
            queued,
            timeout_s,
            self.clock,
            self.metrics,
            self._on_release,
            lambda asked, promised: self.free is None or promised + asked <= self.free,
            readers=self,
            **options,
        )

    def _on_release(self) -> None:
        self.released += 1

    def line_wait_s(self) -> float:
        return self.wait_at_nodes

    def read_tokens_per_s(self) -> float:
        return 0.0

    def reading_s(self, tokens: float) -> float:
        return 0.0

    def ask(self, tenant: str = "", count: int = 1, **asked: Any) -> asyncio.Task[Slots]:
        return asyncio.create_task(self.admission.acquire(tenant, AskedPlaces(count, **asked), self.clock() + SOON))

    def want(self, tokens: int, tenant: str = "", count: int = 1) -> asyncio.Task[Slots]:
        return self.ask(tenant, count, kv_tokens=tokens)

    def begin(self, slots: Slots) -> None:
        """The request's node reports its blocks as taken."""
        slots.begin_one()
        assert self.free is not None
        self.free -= slots.kv_tokens

    @property
    def counts(self) -> tuple[int, int]:
        return self.admission.held, self.admission.queued

    async def order(self, *asked: tuple[str, int]) -> list[str]:
        """In which order these tenants, each with a priority, get the one place that another gives back."""
        slots, order = await self.ask("z"), list[str]()

        async def take(tenant: str, priority: int) -> None:
            mine = await self.ask(tenant, priority=priority)
            order.append(f"{tenant}{priority}")
            mine.release_all()

        tasks = []
        for tenant, priority in asked:
            tasks.append(asyncio.create_task(take(tenant, priority)))
            await settle()
        slots.release_all()
        await asyncio.gather(*tasks)
        return order


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_are_given_back_and_passed_on_in_order() -> None:
    place = Place(1)
    first = await place.ask()
    second, third = place.ask(), place.ask()
    await settle()
    assert place.admission.queued == 2
    first.release_one()
    first.release_one()  # more often than it has: no matter
    slots = await second
    await settle()
    assert not third.done()
    slots.release_all()
    (await third).release_all()
    assert (place.counts, place.released) == ((0, 0), 3)
    slots, waiting = await place.ask(), place.ask()
    await settle()
    place.capacity = 2  # a new node
    place.admission.pump()
    await settle()
    assert waiting.done(), "let in by the new place alone: no other was given back"
    (await waiting).release_all()
    slots.release_all()


@pytest.mark.parametrize(
    ("by_priority", "expected"),
    [(True, ["b-2", "a0", "c0", "b1", "a1", "a1"]), (False, ["a1", "b1", "c0", "a1", "b-2", "a0"])],
)
async def test_the_line_goes_by_priority_where_the_nodes_do(by_priority: bool, expected: list[str]) -> None:
    place = Place(1, by_priority=by_priority)
    assert await place.order(("a", 1), ("b", 1), ("a", 1), ("c", 0), ("b", -2), ("a", 0)) == expected
    turns = await place.order(("a", 0), ("a", 0), ("a", 0), ("b", 0), ("c", 0))
    assert sorted(turns[:3]) == ["a0", "b0", "c0"], "turns go round between tenants"


async def test_a_request_for_many_goes_to_the_end_of_its_priority() -> None:
    place = Place(1, by_priority=True)
    slots = await place.ask()
    many, other, late = place.ask(count=2, priority=1), place.ask(priority=1), place.ask(priority=2)
    await settle()
    slots.release_all()
    first = await many
    await settle()
    assert not other.done()
    first.release_one()
    (await other).release_all()
    await settle()
    assert (first.held, late.done()) == (1, False)
    first.release_all()
    (await late).release_all()


async def test_what_would_wait_for_too_long_at_a_node_is_refused_at_the_door() -> None:
    patient, place = Place(9), Place(9, admit_within_s=2.0)
    for wait_s in (0.0, 1.9):
        place.wait_at_nodes = wait_s
        (await place.ask()).release_all()
    place.wait_at_nodes = patient.wait_at_nodes = 6.5
    with pytest.raises(QueueFull, match=r"about 6\.5 s .* router\.admit_within is 2 s") as refusal:
        await place.ask()
    assert refusal.value.retry_after_s == 5, "by then the line is as short as it must be"
    assert place.counts == (0, 0)
    (await patient.ask()).release_all()


async def test_waiting_has_an_end() -> None:
    place = Place(1, timeout_s=0.05)
    slots = await place.ask()
    with pytest.raises(QueueFull) as refusal:
        await place.ask()
    assert refusal.value.retry_after_s >= 1
    with pytest.raises(DeadlineExceeded):  # its own
        await place.admission.acquire("", AskedPlaces(), place.clock() + 0.01)
    assert place.admission.queued == 0
    slots.release_all()
    (await place.ask()).release_all()


async def test_a_sequence_is_let_in_when_a_node_has_its_blocks() -> None:
    place = Place(1000, tokens=100)
    first, second = await place.want(60), place.want(60)
    await settle()
    assert not second.done(), "60 are promised"
    place.begin(first)
    place.admission.pump()
    await settle()
    assert not second.done(), "and taken"
    place.free = 100
    first.release_one()
    place.begin(await second)
    assert place.admission.promised == 0
    wide = Place(1000, tokens=100)
    slots = await wide.want(30, count=5)
    assert (slots.held, wide.admission.promised) == (3, 90)
    slots.begin_one()
    slots.release_all()
    assert (wide.admission.promised, wide.counts) == (0, (0, 0)), "given back, though four never began"


async def passed_over(place: Place) -> tuple[asyncio.Task[Slots], asyncio.Task[Slots]]:
    """A request for more blocks than are free, which so many others have passed as may; and the next one."""
    place.begin(await place.want(50))
    large = place.want(80, "large")
    await settle()
    for _ in range(MOST_PASSED_OVER):
        small = place.want(10, "small")
        await settle()
        place.admission.pump()
        (await small).release_all()
    last = place.want(10, "small")
    await settle()
    return large, last


async def test_a_line_that_waited_for_a_request_goes_on_when_that_one_gives_up() -> None:
    """Not only with a node's next status."""
    large, last = await passed_over(Place(1000, 1000, tokens=100))
    assert not last.done()
    large.cancel()
    await settle()
    assert last.done()


async def test_a_request_for_more_blocks_than_are_free_closes_the_line_for_others_only_so_long() -> None:
    place = Place(1000, 1000, tokens=100)
    large, last = await passed_over(place)
    place.admission.pump()
    assert not last.done(), "its blocks are kept free from here on"
    place.free = 100
    place.admission.pump()
    assert (await large).held == 1
    await last


async def test_a_wait_that_would_be_too_long_is_refused_at_the_door() -> None:
    place = Place(1, queued=100, timeout_s=0.05)
    running, line = await place.ask(), [place.ask() for _ in range(2)]
    await settle()
    place.admission.waits.between_ends.observe(1.0)  # as measured: one end per second
    with pytest.raises(QueueFull, match="about 3 s") as refusal:
        await place.ask()
    assert refusal.value.retry_after_s == 3
    running.release_all()
    for waiting in line:
        (await waiting).release_all()


async def test_whoever_stops_waiting_leaves_nothing_behind() -> None:
    place = Place(1)
    slots = await place.ask()
    gone, last = place.ask(), place.ask()
    await settle()
    gone.cancel()
    await settle()
    assert place.admission.queued == 1
    slots.release_all()  # its place is here, it has not run yet
    last.cancel()
    await settle()
    assert place.admission.held == 0
    (await place.ask()).release_all()


async def test_a_wide_request_keeps_no_place_empty_and_nobody_waiting() -> None:
    """128 wide, 56 places free: all of them are used, and single requests of others get every second one."""
    place = Place(256, queued=1024)
    running = [await place.ask(f"t{index}") for index in range(200)]
    wide = await place.ask("wide", 128)
    assert place.admission.held == 256
    narrow = [place.ask(f"u{index}") for index in range(20)]
    await settle()
    for slots in running[:40]:
        slots.release_one()
    await settle()
    assert all(task.done() for task in narrow)
    assert (wide.held, place.admission.held) == (56 + 20, 256)
    for slots in running[40:]:
        slots.release_one()
    assert wide.held == 128
    wide.release_all()


async def test_a_wide_request_is_not_starved_by_narrow_ones_of_its_own_tenant() -> None:
    place = Place(1, queued=100)
    now = await place.ask()
    wide = place.ask(count=3)
    await settle()
    had = 0
    for _ in range(12):
        narrow = place.ask()
        await settle()
        now.release_one()
        await settle()
        if wide.done() and wide.result().held:
            had += 1
            now = wide.result()
            narrow.cancel()
        else:
            now = await narrow
        await settle()
    assert had >= 3


@given(
    widths=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=12),
    capacity=st.integers(1, 8),
    data=st.data(),
)
@in_loop
async def test_places_are_neither_lost_nor_given_twice_nor_left_empty(
    widths: list[tuple[str, int]], capacity: int, data: st.DataObject
) -> None:
    place = Place(capacity, queued=1000)
    tasks = [place.ask(tenant, count) for tenant, count in widths]
    alive: list[Slots] = []
    done: set[int] = set()
    while len(done) < len(tasks) or any(slots.held or slots.wanted for slots in alive):
        await settle()
        for index, task in enumerate(tasks):
            if index not in done and task.done():
                done.add(index)
                alive.append(task.result())
        assert place.admission.held == sum(slots.held for slots in alive) <= capacity
        assert place.admission.held == capacity or place.admission.queued == 0
        slots = data.draw(st.sampled_from([slots for slots in alive if slots.held]))
        data.draw(st.sampled_from([slots.release_one, slots.drop_one, slots.release_all]))()
    assert place.counts == (0, 0)


async def test_how_long_the_first_in_line_has_waited_is_known() -> None:
    clock = [100.0]
    admission = Admission(lambda: 1, 10, 60.0, lambda: clock[0], RouterMetrics(), lambda: None)
    assert admission.oldest_wait_s() == 0.0
    first = await admission.acquire("a", AskedPlaces(), 200.0)
    waiting = [asyncio.create_task(admission.acquire(name, AskedPlaces(), 200.0)) for name in ("a", "b")]
    await asyncio.sleep(0)
    clock[0] += 7.0
    assert admission.oldest_wait_s() == 7.0
    first.release_all()
    for each in waiting:
        (await each).release_all()
    assert admission.oldest_wait_s() == 0.0


class Sequences:
    """A request's sequences, of which each pauses when it is asked to."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.paused = 0
        self.given = slots.held
        slots.listen(self._on_place, lambda error: None, self._on_give_way)

    def _on_place(self) -> None:
        self.given += 1

    def _on_give_way(self, unread: bool) -> bool:
        self.paused += 1
        self.slots.pause_one()
        return True


async def test_a_key_may_have_all_places_and_gives_some_up_to_others() -> None:
    place = Place(4)
    older, newer = Sequences(await place.ask("greedy", 2)), Sequences(await place.ask("greedy", 2))
    waiting = place.ask("greedy")
    await settle()
    others = [await place.ask("other"), await place.ask("other")]
    assert (older.paused, newer.paused) == (0, 2), "each has an even part, and the latest began last"
    assert place.metrics.registry.get_sample_value("tandem_sequences_paused_total") == 2
    third = place.ask("other")
    await settle()
    assert not third.done(), "it has its part"
    assert not waiting.done()
    for slots in others:
        slots.release_all()
    (await third).release_all()
    assert newer.given == 4, "what has paused goes on before its key's next request"
    for sequences in (older, newer):
        sequences.slots.release_all()
    (await waiting).release_all()
    assert place.counts == (0, 0)


async def test_what_is_more_urgent_pauses_for_none() -> None:
    place = Place(2, by_priority=True)
    urgent = Sequences(await place.ask("a", 2, priority=-1))
    other = place.ask("b")
    await settle()
    assert urgent.paused == 0
    urgent.slots.release_all()
    (await other).release_all()


async def test_a_key_has_a_share_of_the_line() -> None:
    place = Place(1, queued=6)
    running = await place.ask("greedy")
    waiting = [place.ask("greedy") for _ in range(3)]
    await settle()
    with pytest.raises(QueueFull, match="of this key wait already"):
        await place.ask("greedy")
    waiting.append(place.ask("other"))
    await settle()
    running.release_all()
    for done in asyncio.as_completed(waiting):
        (await done).release_all()
    assert place.counts == (0, 0)


async def test_background_answers_of_one_key_leave_as_many_places_as_they_have() -> None:
    place = Place(4, queued=20)

    answers = [place.ask("greedy", background=True) for _ in range(4)]
    await settle()
    assert [task.done() for task in answers] == [True, True, False, False]
    own = await place.ask("greedy")
    other = await place.ask("other")
    for slots in (own, other, await answers[0]):
        slots.release_all()
    await settle()
    assert [task.done() for task in answers] == [True, True, True, False]
    for task in answers[1:]:
        (await task).release_all()
    assert place.counts == (0, 0)
