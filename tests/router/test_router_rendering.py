"""One rendering serves all who ask at about the same time."""

from __future__ import annotations

import asyncio

import pytest

from tandem.router.http.rendering import SERVES_S, SharedRendering


async def test_one_serves_all_who_wait_for_it_and_those_who_come_soon_after() -> None:
    now, made, go_on = 0.0, 0, asyncio.Event()

    async def render() -> bytes:
        nonlocal made
        made += 1
        await go_on.wait()
        return b"page %d" % made

    rendering = SharedRendering(render, lambda: now)
    asked = [asyncio.create_task(rendering.get()) for _ in range(50)]
    await asyncio.sleep(0)
    asked[0].cancel()  # this client goes away; the others still get theirs
    await asyncio.sleep(0)
    go_on.set()
    pages = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(pages[0], asyncio.CancelledError)
    assert set(pages[1:]) == {b"page 1"}
    now += SERVES_S * 0.9
    assert await rendering.get() == b"page 1"
    now += SERVES_S * 0.2
    assert await rendering.get() == b"page 2"


async def test_a_failure_is_told_and_the_next_is_tried() -> None:
    failures = [ValueError("broken")]

    async def render() -> bytes:
        if failures:
            raise failures.pop()
        return b"whole"

    rendering = SharedRendering(render, lambda: 0.0)
    with pytest.raises(ValueError, match="broken"):
        await rendering.get()
    assert await rendering.get() == b"whole"
