"""How much begins in one pass of the event loop."""

from __future__ import annotations

import asyncio

from tandem.http_server.turns import TURNS_A_PASS, Turns


def test_of_many_that_come_at_once_a_few_begin_in_each_pass_in_their_order() -> None:
    async def work() -> list[tuple[int, int]]:
        loop = asyncio.get_running_loop()
        turns, begun, number = Turns(), [], 0

        def count() -> None:
            nonlocal number
            number += 1
            loop.call_soon(count)

        loop.call_soon(count)
        for one in range(10):
            turns.begin(lambda one=one: begun.append((number, one)))  # type: ignore[misc]
        while len(begun) < 10:  # noqa: ASYNC110 (what is counted are passes of the loop)
            await asyncio.sleep(0)
        return begun

    begun = asyncio.run(work())
    assert [one for _, one in begun] == list(range(10))
    counts = [sum(number == each for number, _ in begun) for each in {number for number, _ in begun}]
    assert counts[0] == TURNS_A_PASS
    assert max(counts) <= TURNS_A_PASS


async def test_a_turn_that_was_cancelled_is_passed_over() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.turn()) for _ in range(4 * TURNS_A_PASS)]
    await asyncio.sleep(0)
    for task in tasks[1::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(5):
        await turns.turn()
