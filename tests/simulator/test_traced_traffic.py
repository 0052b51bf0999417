"""A node's scheduler trace becomes traffic: the requests that it took, their arrivals and their lengths."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.cli import main
from tandem.cluster.replay.reading import TraceReader
from tandem.node.step_trace.records import StepTrace
from tandem.simulator.traffic import rows_of_steps
from tests.engine.scheduling.driving import Driver
from tests.simulator.worlds import node_costs


def traced(folder: Path, lengths: list[tuple[int, int]], *, num_blocks: int = 60) -> Path:
    lines: list[bytes] = []
    driver = Driver(num_blocks=num_blocks, caching=False, watcher=StepTrace("decode-0", lines.append))
    for number, (prompt, answer) in enumerate(lengths):
        driver.add(f"req-{number}", prompt=prompt, max_tokens=answer)
        if number % 2:
            driver.step()
    driver.run()
    half = next(index for index in range(len(lines) // 2, len(lines)) if b"step_snapshot" in lines[index])
    (folder / "decode-0.old.jsonl").write_bytes(b"".join(lines[:half]))
    (folder / "decode-0.jsonl").write_bytes(lines[0] + b"".join(lines[half:]))
    return folder / "decode-0.jsonl"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(2, 12)), min_size=1, max_size=12))
def test_every_request_is_there_with_its_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]]
) -> None:
    """In a pool that has to preempt, too."""
    file = traced(tmp_path_factory.mktemp("trace"), lengths, num_blocks=12)
    rows = rows_of_steps(TraceReader(file))
    assert sorted((row.input_tokens, row.output_tokens) for row in rows) == sorted(lengths)
    assert rows[0].arrival_s == 0.0
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)


def test_it_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "node.json"
    costs.write_bytes(msgspec.json.encode(node_costs()))
    file = traced(tmp_path, [(9, 4), (5, 3), (12, 2)])
    given_words = ["simulate", "--costs", str(costs), "--trace", str(file), "--aggregated", "1"]
    assert main([*given_words, "--prefill", "0", "--decode", "0", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert (report["served"], report["prompt_tokens"], report["output_tokens"]) == (3, 26, 9)
