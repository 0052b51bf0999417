"""Work that no one may wait for any more: in tasks, and in threads."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tandem.base.own_thread import in_own_thread
from tandem.cluster.commands.operate import HttpControl
from tandem.cluster.orders import ViewOrder
from tandem.cluster.tasks import first_ended


async def test_work_whose_result_is_no_longer_wanted_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    goes_on = threading.Event()
    threads: list[threading.Thread] = []

    def work() -> bool:
        threads.append(threading.current_thread())
        return goes_on.wait(10.0)

    waiting = asyncio.wrap_future(in_own_thread("work", work))
    waiting.cancel()
    goes_on.set()
    await asyncio.gather(waiting, return_exceptions=True)
    threads[0].join(10.0)
    assert raised == []


async def test_a_wait_for_the_first_that_is_cancelled_twice_leaves_none_running() -> None:
    may_end, ended = asyncio.Event(), asyncio.Event()
    waits = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            waits.set()
            await may_end.wait()
            raise

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(first_ended([slow_to_end(), other()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait_for(waits.wait(), 10.0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(ended.wait(), 10.0)
    may_end.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=10.0)


def test_a_command_that_is_interrupted_does_not_wait_for_the_answer() -> None:
    over, was_waited_for = threading.Event(), threading.Event()

    def answer_late(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            if not over.wait(10.0):
                was_waited_for.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer_late, args=(listening,), daemon=True)
        thread.start()
        control = HttpControl(f"http://127.0.0.1:{listening.getsockname()[1]}", None)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(control.ask(ViewOrder()), 0.2))
        over.set()
        thread.join(20.0)
        control.close()
    assert not was_waited_for.is_set()
