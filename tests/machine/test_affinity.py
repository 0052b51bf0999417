from __future__ import annotations

import os
import threading

import pytest

from tandem.base.errors import ConfigurationError
from tandem.engine.core import StepResult
from tandem.machine.resources import bind, threads_here
from tandem.node.loop import EngineLoop, Mailbox


def test_threads_are_bound_one_by_one_and_new_ones_follow_who_made_them() -> None:
    everywhere = os.sched_getaffinity(0)
    one = {min(everywhere)}
    found: list[set[int]] = []

    def work() -> None:
        bind([threading.get_native_id()], one)
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [one]
    assert os.sched_getaffinity(0) == everywhere
    assert threading.get_native_id() in threads_here()


def test_cores_that_are_not_there_are_a_mistake_in_the_settings_and_a_thread_that_has_ended_is_none() -> None:
    with pytest.raises(ConfigurationError, match="5000"):
        bind([threading.get_native_id()], [5000])
    bind([2**22 + 5], os.sched_getaffinity(0))


def test_the_step_thread_stays_on_its_cores() -> None:
    one = min(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    ended = threading.Event()

    class Engine:
        def step(self) -> StepResult:
            seen.append(os.sched_getaffinity(0))
            ended.set()
            return StepResult([], False)

    class Host:
        def __getattr__(self, name: str):
            return lambda *args: None

    mailbox: Mailbox[str] = Mailbox()
    loop = EngineLoop(Engine(), mailbox, Host(), cores=[one])  # type: ignore[arg-type]
    loop.start()
    mailbox.wake()
    assert ended.wait(5)
    assert loop.stop()
    assert seen[0] == {one}
