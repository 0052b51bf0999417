"""How much begins in one pass of the event loop."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tandem.http_server.turns import MOST_A_PASS, PASS_S, Turns


@pytest.mark.parametrize(("piece_s", "a_pass"), [(PASS_S / 3.5, 4), (PASS_S * 2, 1), (PASS_S / 1000, 20)])
def test_of_many_that_come_at_once_as_many_begin_in_each_pass_as_there_is_time_for(piece_s: float, a_pass: int) -> None:
    now, number, begun = 0.0, 0, list[tuple[int, int]]()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        turns = Turns(lambda: now)

        async def one(name: int) -> None:
            nonlocal now
            await turns.turn()
            begun.append((number, name))
            now += piece_s

        def count() -> None:
            nonlocal number
            number += 1
            loop.call_soon(count)

        loop.call_soon(count)
        tasks = [asyncio.create_task(one(name)) for name in range(10)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(one(name)) for name in range(10, 20)]
        await asyncio.gather(*tasks)

    asyncio.run(work())
    assert [name for _, name in begun] == list(range(20))
    counts = [len(list(each)) for _, each in itertools.groupby(begun, key=lambda one: one[0])]
    assert max(counts) == min(a_pass, 10)
    assert len(counts) <= 20 / a_pass + 2


async def test_a_turn_that_was_cancelled_is_passed_over() -> None:
    turns = Turns(itertools.count(step=PASS_S).__next__)
    tasks = [asyncio.create_task(turns.turn()) for _ in range(4 * MOST_A_PASS)]
    await asyncio.sleep(0)
    for task in (*tasks[1 : 2 * MOST_A_PASS], *tasks[2 * MOST_A_PASS :: 2]):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(5):
        await turns.turn()
