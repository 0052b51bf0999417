"""The progress reports of long work, and how its silence is measured."""

from __future__ import annotations

import threading

import pytest

from tandem.base.progress import LastProgress, SaidProgress, with_amount, without_amount

PATIENCE_S = 30.0


class Watch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_what_is_said_twice_is_no_progress(watch: Watch) -> None:
    progress = LastProgress(watch)
    for watch.seconds in (0.0, 30.0, 60.0):
        progress.report("downloading", 0.25)
    assert progress.silent_s == 60.0
    assert str(progress) == "at 'downloading', 25% of it"
    progress.report("downloading", 0.26)
    assert progress.silent_s == 0.0


def test_a_look_comes_no_later_than_the_limit_and_often_enough(watch: Watch) -> None:
    progress = LastProgress(watch)
    for watch.seconds, next_look in ((0.0, 5.0), (98.0, 2.0), (100.0, 0.0)):
        assert progress.next_look(100.0) == next_look
    watch.seconds = 1000.0
    progress.overslept(995.0)
    assert progress.silent_s == 5.0, "time for which the one that looks stood still is not counted"
    progress.report("loading", 0.0)
    progress.begin()
    assert str(progress) == "and had said nothing"


def test_an_amount_is_no_other_work() -> None:
    for num_bytes in (0, 999_999, 12_000_000, 1_234_567_890_123):
        said = with_amount("downloading me/model (v2)", num_bytes)
        assert said.endswith(f"({num_bytes // 1_000_000:,} MB)")
        assert without_amount(said) == "downloading me/model (v2)" == without_amount("downloading me/model (v2)")


def test_who_waits_hears_of_the_next_step_and_of_no_repeated_one_and_is_not_kept_when_it_is_over() -> None:
    said = SaidProgress()
    said.report("loading", 0.5)
    said.report("loading", 0.5)
    assert said.after(0, PATIENCE_S) == (1, "loading", 0.5)
    assert said.after(1, 0.001) == (1, "loading", 0.5), "nothing newer came"
    heard: list[tuple[int, str, float]] = []
    waiter = threading.Thread(target=lambda: heard.append(said.after(1, PATIENCE_S)))
    waiter.start()
    said.report("recording", 0.0)
    waiter.join(PATIENCE_S)
    assert heard == [(2, "recording", 0.0)]
    said.end()
    assert said.after(2, 10 * PATIENCE_S) == (2, "recording", 0.0)
