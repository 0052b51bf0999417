"""A task that is kept is started again, however it ended."""

from __future__ import annotations

import asyncio

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
