from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from tandem.cluster.chaos.conductor import BlowReport
from tandem.cluster.chaos.probes import Traffic
from tandem.cluster.chaos.report import ChaosReport, bounds, judge, print_report, rule_of_three

GOOD = ChaosReport(
    made_at="2026-01-01T00:00:00+00:00", command="tandem chaos --yes", model="tiny", seed=3, minutes=5.0,
    blows=[BlowReport(30.0, "kill", "decode", "decode-0", "10.0.0.1", 0.0, 4.25, 0.8)],
    traffic=Traffic("probes", requests=300, right=300), blocks_back_after_s=1.5, left_behind=[],
)  # fmt: skip


def shown(report: ChaosReport) -> str:
    out = io.StringIO()
    print_report(Console(file=out, width=200), report)
    return out.getvalue()


def test_nothing_bad_in_n_tries_is_a_bound_and_no_proof() -> None:
    assert judge(GOOD) == []
    said = bounds(GOOD)
    assert any("none of 300 answers was wrong: fewer than 1.000%" in line for line in said)
    assert any("none of 300 requests was lost" in line for line in said)
    assert rule_of_three(1).startswith("100")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"traffic": Traffic("probes", requests=9, right=8, wrong=["'a' instead of 'b'"])}, "1 wrong answers"),
        ({"traffic": Traffic("probes", requests=9, lost={"cut off": 2}, examples={"cut off": "why"})}, "2 requests"),
        ({"traffic": Traffic("probes", requests=9, failed={"node_lost": 1})}, "node_lost"),
        ({"traffic": Traffic("probes")}, "no request was sent"),
        ({"failure": "the kill after 30 s could not be dealt"}, "could not be dealt"),
        ({"left_behind": ["decode-0: held blocks 3"]}, "left behind: decode-0: held blocks 3"),
        ({"blows": [msgspec.structs.replace(GOOD.blows[0], whole_after_s=None, detail="not whole again")]}, "decode-0: not whole again"),
    ],
)  # fmt: skip
def test_what_must_not_be_is_said_and_takes_the_bound_away(changes: dict[str, object], said: str) -> None:
    report = msgspec.structs.replace(GOOD, **changes)
    report.faults = judge(report)
    assert any(said in fault for fault in report.faults)
    assert not any("nothing bad came" in line for line in bounds(report))
    assert said in shown(report)


def test_the_table_shows_recovery_and_blocks_and_the_report_is_json_and_back() -> None:
    text = shown(GOOD)
    for part in ("decode-0", "4.2", "0.8", "300 requests", "every block was free 1.5 s"):
        assert part in text
    own = msgspec.structs.replace(GOOD, traffic=Traffic("own", requests=10), blocks_back_after_s=None)
    assert "blocks were not counted" in shown(own)
    assert msgspec.json.decode(msgspec.json.encode(GOOD), type=ChaosReport) == GOOD
