"""The numbered event log, as another process follows it."""

from __future__ import annotations

import asyncio

from tandem.cluster.pools.event_log import KEPT, EventKind, EventLog, replay
from tests.cluster.pools.helpers import RecordedEvents


async def test_who_follows_sees_each_event_once_and_in_order() -> None:
    log = EventLog(RecordedEvents())
    log.progress("decode-0", "loading", 0.1)
    log.ready("router", "http://r")
    first = log.after(0)
    assert [(one.number, one.kind) for one in first] == [(1, EventKind.PROGRESS), (2, EventKind.READY)]
    log.trouble("decode-0", "died")
    log.gave_up("decode-0", "no memory")
    assert [one.kind for one in log.after(first[-1].number)] == [EventKind.TROUBLE, EventKind.GAVE_UP]
    assert log.after(log.latest) == []


async def test_of_a_name_s_progress_only_the_latest_is_kept() -> None:
    log = EventLog(RecordedEvents())
    for step in range(3):
        log.progress("decode-0", f"step {step}", step / 3)
        log.progress("prefill-0", f"step {step}", step / 3)
    assert [(one.name, one.what) for one in log.after(0)] == [("decode-0", "step 2"), ("prefill-0", "step 2")]


async def test_who_waits_is_woken_by_what_is_new_and_else_by_the_time() -> None:
    log = EventLog(RecordedEvents())
    await log.wait_after(0, 0.01)
    assert log.after(0) == []
    waiting = asyncio.create_task(log.wait_after(0, 60))
    await asyncio.sleep(0)
    log.ready("router", "http://r")
    await waiting
    await log.wait_after(0, 60)  # something newer is there already
    await log.wait_after(99, 60)
    assert [one.number for one in log.after(99)] == [1], "who followed an earlier controller sees all of this one"


async def test_old_events_are_forgotten_and_replaying_says_what_was_said_there() -> None:
    there, here = RecordedEvents(), RecordedEvents()
    log = EventLog(there)
    log.progress("router", "loading", 0.5)
    log.ready("router", "http://r")
    log.trouble("router", "died")
    log.gave_up("prefill-0", "no model")
    replay(log.after(0), here)
    assert here.happened == there.happened
    for number in range(2 * KEPT):
        log.trouble("decode-0", str(number))
    kept = log.after(0)
    assert (len(kept), kept[-1].number) == (KEPT, 2 * KEPT + 4)
