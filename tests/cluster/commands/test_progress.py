"""What a start shows of itself."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tandem.cluster.commands.progress import Display, StartStep
from tandem.cluster.commands.ready_lines import ready_lines, timing_lines
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ClusterView
from tandem.cluster.pools.controller_host import ClusterAccount, ClusterStage


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_activity_lasts_until_the_next_of_its_process(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    seconds = [100.0]
    monkeypatch.setattr("tandem.cluster.commands.progress.time.monotonic", lambda: seconds[0])
    display = Display(Console(file=io.StringIO(), force_terminal=is_terminal))
    display.start()
    with display.step("ray", "starting", "running"):
        display.progress("decode-0", "loading weights", 0.0)
        seconds[0] += 2
        display.progress("decode-0", "loading weights", 0.5)
    display.progress("decode-0", "warming up", 0.0)
    seconds[0] += 1
    display.ready("decode-0", "decode")
    display.stop()
    found = display.steps()
    assert found == [
        StartStep("ray", "starting", 0.0, 2.0),
        StartStep("decode-0", "loading weights", 0.0, 2.0),
        StartStep("decode-0", "warming up", 2.0, 1.0),
    ]
    assert timing_lines(found)[1].split() == ["0.00", "s", "ray", "2.00", "s", "starting"]


def test_an_address_in_brackets_is_printed_whole() -> None:
    account = ClusterAccount(ClusterStage.SERVING, [], 0, "http://[fd00::1]:8000", "tiny")
    lines = ready_lines(account, ClusterView("tiny", [], [], [], []), TandemConfig(), "/tmp", 1.0, detached=False)
    out = io.StringIO()
    Console(file=out).print("\n".join(lines), soft_wrap=True)
    assert out.getvalue().count("http://[fd00::1]:8000") == 3
