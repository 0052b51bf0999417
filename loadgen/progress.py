"""What the operator sees while a run goes on: one line, on stderr."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.loadgen.load import Load

_REFRESH_S = 0.5
_PLAIN_LINE_S = 5.0  # where a line cannot be redrawn, in a log


async def with_progress(run: Awaitable[None], loads: Sequence[Load], console: Console, title: str) -> None:
    """Shows the loads' progress until `run` ends."""
    shown = asyncio.create_task(
        _redraw(loads, console, title) if console.is_terminal else _log(loads, console, title)
    )
    try:
        await run
    finally:
        shown.cancel()
        await asyncio.gather(shown, return_exceptions=True)


async def _redraw(loads: Sequence[Load], console: Console, title: str) -> None:
    columns = (TextColumn(title), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(title, total=sum(load.total for load in loads), state="")
        try:
            while True:
                progress.update(
                    task, completed=sum(len(load.timelines) for load in loads), state=state_of(loads)
                )
                progress.refresh()
                await asyncio.sleep(_REFRESH_S)
        finally:
            progress.update(task, completed=sum(len(load.timelines) for load in loads), state=state_of(loads))


async def _log(loads: Sequence[Load], console: Console, title: str) -> None:
    while True:
        await asyncio.sleep(_PLAIN_LINE_S)
        console.print(f"{title}: {state_of(loads)}", highlight=False)


def state_of(loads: Sequence[Load]) -> str:
    ended = sum(len(load.timelines) for load in loads)
    total = sum(load.total for load in loads)
    failed = sum(not timeline.succeeded for load in loads for timeline in load.timelines)
    running = sum(len(load.active) for load in loads)
    chunks = sum(
        len(timeline.chunk_times)
        for load in loads
        for group in (load.timelines, load.active)
        for timeline in group
    )
    elapsed = max((load.duration_s for load in loads), default=0.0)
    rate = chunks / elapsed if elapsed > 0 else 0.0
    failures = f" · {failed} failed" if failed else ""
    return f"{ended}/{total} requests · {running} running · {rate:.0f} tokens/s{failures}"
