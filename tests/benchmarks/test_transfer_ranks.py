"""`benchmarks.transfer --ranks`: that it says what widths there can be, and that what moves in a run is what it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import transfer
from benchmarks.transfer_ranks import LLAMA_1B, RankPairs
from tandem.kvtransfer.config import TransferConfig
from tests.more import more

pytestmark = pytest.mark.timeout(600)  # six processes load torch


@pytest.mark.parametrize("widths", ["2", "2x", "x2", "3x1", "0x2", "16x16", "2x2x2", "-1x2", "axb"])
def test_other_widths_are_refused_with_those_that_there_are(widths: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        transfer.main([f"--ranks={widths}"])
    assert "each must be one of 1, 2, 4, 8, which divide the 8 heads" in capsys.readouterr().err


@pytest.mark.parametrize(("widths", "direction"), more([("2x1", "push"), ("1x2", "pull")]))
def test_a_small_run_names_both_rates_and_the_floor(
    widths: str, direction: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(transfer, "CASES_OF_RANKS", [(64, 2)])
    written = tmp_path / "figures.json"
    arguments = ["--ranks", widths, "--quick", "--direction", direction, "--json", str(written)]
    transfer.main(arguments)  # whether its floor is met on a busy machine is not tested
    shown = capsys.readouterr().out
    assert "raw gb s" in shown
    assert "at least 0.85" in shown
    (row,) = json.loads(written.read_text())["figures"]["throughput"]
    assert row["mb"] == round(8 * LLAMA_1B.block_bytes / 1e6, 1)
    assert row["ms"] > 0 < row["raw_ms"]


@pytest.mark.parametrize("direction", more(["pull", "push"]))
def test_what_is_called_raw_moves_the_bytes_that_the_connector_moves(direction: str) -> None:
    """Nodes of unlike widths: each rank's heads, and the connector's after that, so that neither is faster for moving less."""
    blocks = 5
    pairs = RankPairs((2, 4), blocks, TransferConfig(direction=direction), repeats=1)  # type: ignore[arg-type]
    try:
        producers, consumers = pairs.ranks[:2], pairs.ranks[2:]
        for move, first in ((lambda: pairs.move_raw(blocks - 1), 0.0), (lambda: pairs.transfer(64, 1), 50.0)):
            for rank, producer in enumerate(producers):
                producer.call("fill", first + rank + 1)
            for consumer in consumers:
                consumer.call("fill", 0.0)
            move()
            for rank, consumer in enumerate(consumers):
                given = first + rank // 2 + 1
                assert consumer.call("values_of_blocks") == [0.0] + [given] * (blocks - 1)
    finally:
        pairs.close()
