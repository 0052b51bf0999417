"""How much costly work an owner does at once."""

from __future__ import annotations

import asyncio

from tandem.base.shares import OneAtATime


def test_an_owner_does_one_costly_thing_at_a_time_and_others_do_not_wait_for_it() -> None:
    async def work() -> list[str]:
        one_each, begun, go = OneAtATime(), [], asyncio.Event()

        async def do(owner: str) -> None:
            async with one_each.turn(owner):
                begun.append(owner)
                await go.wait()

        tasks = [asyncio.create_task(do(owner)) for owner in ("greedy", "greedy", "other", "", "")]
        for _ in range(5):
            await asyncio.sleep(0)
        before = list(begun)
        go.set()
        await asyncio.gather(*tasks)
        assert len(begun) == 5
        return before

    assert asyncio.run(work()) == ["greedy", "other", "", ""]
