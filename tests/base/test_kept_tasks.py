"""A task that is kept is started again, however it ended; and how much costly work an owner does at once."""

from __future__ import annotations

import asyncio

from tandem.base.shares import OneAtATime
from tandem.base.tasks import Tasks


async def test_one_that_ends_because_what_it_waits_for_is_cancelled_is_started_again() -> None:
    tasks, goes_on = Tasks(), asyncio.Event()

    async def work() -> None:
        if tasks.restarts["it"]:
            goes_on.set()
            await asyncio.Event().wait()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.cancel()
        await answer

    tasks.keep("it", work)
    await asyncio.wait_for(goes_on.wait(), 10.0)
    assert tasks.restarts == {"it": 1}
    await asyncio.wait_for(tasks.stop(), 10.0)


async def test_an_owner_does_one_costly_thing_at_a_time_and_others_do_not_wait_for_it() -> None:
    one_each, begun, go = OneAtATime(), list[str](), asyncio.Event()

    async def do(owner: str) -> None:
        async with one_each.turn(owner):
            begun.append(owner)
            await go.wait()

    tasks = [asyncio.create_task(do(owner)) for owner in ("greedy", "greedy", "other", "", "")]
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun == ["greedy", "other", "", ""]
    go.set()
    await asyncio.gather(*tasks)
    assert len(begun) == 5
