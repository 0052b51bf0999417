from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tandem.router.dispatch.admission import Admission, QueueFull, Slots
from tandem.router.metrics import RouterMetrics
from tandem.wire.errors import DeadlineExceeded

SOON = 5.0


class Place:
    """An admission with `capacity` places, on a loop of its own."""

    def __init__(self, capacity: int, queued: int = 10, timeout_s: float = SOON) -> None:
        self.capacity = capacity
        self.clock = asyncio.get_running_loop().time
        self.released = 0
        self.admission = Admission(
            lambda: self.capacity, queued, timeout_s, self.clock, RouterMetrics(), self._on_release
        )

    def _on_release(self) -> None:
        self.released += 1

    def ask(self, tenant: str = "", count: int = 1) -> asyncio.Task[Slots]:
        return asyncio.create_task(self.admission.acquire(tenant, count, self.clock() + SOON))


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await work()

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_places_are_given_back_and_passed_on_in_order() -> None:
    async def work() -> None:
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
        assert (place.admission.held, place.admission.queued) == (0, 0)
        assert place.released == 3

    run(work)


def test_turns_go_round_between_tenants() -> None:
    async def work() -> None:
        place = Place(1)
        slots = await place.ask("a")
        order: list[str] = []

        async def take(tenant: str) -> None:
            mine = await place.ask(tenant)
            order.append(tenant)
            mine.release_all()

        tasks = []
        for tenant in ("a", "a", "a", "b", "c"):
            tasks.append(asyncio.create_task(take(tenant)))
            await settle()
        slots.release_all()
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c", "a", "a"]

    run(work)


def test_the_queue_has_an_end() -> None:
    async def work() -> None:
        place = Place(1, queued=2)
        slots = await place.ask()
        waiting = [place.ask(), place.ask()]
        await settle()
        with pytest.raises(QueueFull) as full:
            await place.ask()
        assert full.value.retry_after_s >= 1
        slots.release_all()
        for task in waiting:
            (await task).release_all()

    run(work)


def test_waiting_has_an_end() -> None:
    async def work() -> None:
        place = Place(1, timeout_s=0.05)
        slots = await place.ask()
        with pytest.raises(DeadlineExceeded):
            await place.ask()
        assert place.admission.queued == 0
        slots.release_all()
        (await place.ask()).release_all()

    run(work)


def test_whoever_stops_waiting_leaves_nothing_behind() -> None:
    async def work() -> None:
        place = Place(1)
        slots = await place.ask()
        gone, last = place.ask(), place.ask()
        await settle()
        gone.cancel()
        await settle()
        assert place.admission.queued == 1
        slots.release_all()
        (await last).release_all()
        assert place.admission.held == 0

    run(work)


def test_whoever_is_cancelled_the_moment_its_place_comes_gives_it_back() -> None:
    async def work() -> None:
        place = Place(1)
        slots = await place.ask()
        gone = place.ask()
        await settle()
        slots.release_all()  # its place is here, it has not run yet
        gone.cancel()
        await settle()
        assert place.admission.held == 0
        (await place.ask()).release_all()

    run(work)


def test_a_request_larger_than_everything_gets_in_alone() -> None:
    async def work() -> None:
        place = Place(2)
        slots = await place.ask()
        large = place.ask(count=5)
        await settle()
        assert not large.done()
        slots.release_all()
        (await large).release_all()

    run(work)


def test_a_new_node_lets_in_those_who_wait() -> None:
    async def work() -> None:
        place = Place(1)
        slots = await place.ask()
        waiting = place.ask()
        await settle()
        assert not waiting.done()
        place.capacity = 2
        place.admission.pump()
        await settle()
        assert waiting.done(), "let in by the new place alone: no other was given back"
        (await waiting).release_all()
        slots.release_all()

    run(work)
