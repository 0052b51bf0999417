"""The benchmark `foresight` grades simulated changes by the code with which a cluster grades its own."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.foresight import changes
from tandem.wire.forecasts import FIGURES


def test_every_figure_of_simulated_changes_is_graded() -> None:
    rows = changes(Namespace(changes=5))
    assert [row["figure"] for row in rows] == list(FIGURES)
    assert {row["changes"] for row in rows} == {5}
    assert sum(row["inside"] for row in rows) > 2 * len(rows), "most intervals have what came"
