"""A few of the faults that `make test-lab` does all of, each once: what they leave of requests, streams and blocks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from fault_event import Run
from fault_runs import Table, plan, read_lines, report
from fault_table import all_faults
from tools import lab_or_skip

pytestmark = [pytest.mark.timeout(1800), pytest.mark.integration]

BOUNDED = (
    "reset: tokens of a decode host",
    "reset: KV to a decode host",
    "reset: requests to a decode host",
    "refused: requests to a prefill host",
    "stopped: decode, 1 s",
    "killed: decode",
    "killed: prefill",
    "killed: controller",
    "data: prefill to decode is cut, 1 s",
    "control: a decode host is not heard, 5 s",
    "crowd: clients leave during slow moves",
)


def test_every_fault_has_a_name_of_its_own_and_the_bounded_share_names_some_of_them() -> None:
    names = [fault.name for fault in all_faults()]
    assert len(names) == len(set(names)) >= 20
    assert set(BOUNDED) <= set(names)


def test_every_fault_is_done_over_every_rate_or_twice_and_all_of_them_first_once() -> None:
    faults = all_faults()
    events = list(plan(faults))
    assert [event.fault for event in events[: len(faults)]] == faults
    for fault in faults:
        rates = [event.rate for event in events if event.fault is fault]
        assert len(rates) >= 2
        assert fault.rate is not None or len(set(rates)) == len(rates)
    # Each is met by requests of five phases or more: ten runs of every fault, 400 in all.
    assert 5 * len(events) >= 400


def test_a_line_that_was_cut_off_with_its_process_is_no_line(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    assert read_lines(file) == []
    file.write_text('{"fault": "a"}\n{"fault": "b"}\n{"fau')
    assert [line["fault"] for line in read_lines(file)] == ["a", "b"]


def run(**changes: object) -> dict[str, object]:
    made = Run("killed: decode", 0, "1gbit", "decode", 4, right=4)
    return dataclasses.asdict(dataclasses.replace(made, **changes))  # type: ignore[arg-type]


def test_the_bound_stands_only_where_nothing_bad_was_seen() -> None:
    good = report([run() for _ in range(30)])
    assert "nothing bad in 30 runs" in good
    assert "none of 120 answers was wrong" in good
    late = report([run(), run(faults=["a gap of 9.0 s"])])
    assert "nothing bad" not in late
    assert "none of 8 answers was wrong" in late
    wrong = report([run(), run(faults=["wrong: 'a' instead of 'b'"])])
    assert "answers was wrong" not in wrong


def test_each_request_under_a_fault_is_answered_as_in_peace_and_every_block_comes_back(tmp_path: Path) -> None:
    lab_or_skip()
    events = [event for event in plan(all_faults()) if event.fault.name in BOUNDED and event.repetition == 0]
    runs: list[Run] = []
    Table(tmp_path, "tiny", math.inf, tmp_path / "logs", runs.append, print).play(events)
    assert {run.fault for run in runs} == set(BOUNDED)
    assert [f"{run.fault}, {run.phase}: {fault}" for run in runs for fault in run.faults] == []
