"""`tandem simulate` as a user runs it: its output, and one sentence for each invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.cluster.cli import main
from tests.simulator.worlds import node_costs


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "node.json"
    file.write_bytes(msgspec.json.encode(node_costs()))
    return file


def write(folder: Path, text: str) -> str:
    (folder / "trace").write_text(text)
    return str(folder / "trace")


MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,10\n"


def simulated(costs: Path, capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    assert main(["simulate", "--costs", str(costs), *given, "-o", "json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)["report"]
    return report


@pytest.mark.parametrize("trace", [MOONCAKE, AZURE])
def test_both_formats_are_read(costs: Path, capsys: pytest.CaptureFixture[str], trace: str) -> None:
    report = simulated(costs, capsys, "--trace", write(costs.parent, trace))
    assert (report["served"], report["requests"]) == (1, 1)


def test_it_shows_what_users_would_feel(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--rate", "5", "--duration", "4", "--input", "200", "--output", "20", "--slo", "ttft=1s,itl=50ms"]
    assert main(["simulate", "--costs", str(costs), *given]) == 0
    said = capsys.readouterr().out
    for words in ("time to first token", "prefill-1", "20 of 20 requests served", "100.0% of the requests had"):
        assert words in said


def test_the_same_traffic_gives_the_same_answer(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--rate", "3", "--duration", "9", "--spread", "0.5")
    assert simulated(costs, capsys, *given) == simulated(costs, capsys, *given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "give the traffic by --trace FILE or by --rate R"),
        (["--rate", "-1"], "--rate and --duration must be above 0, and finite, not -1"),
        (["--rate", "1", "--duration", "0"], "--rate and --duration must be above 0"),
        (["--rate", "nan"], "--rate and --duration must be above 0, and finite, not nan"),
        (["--rate", "1", "--duration", "inf"], "--rate and --duration must be above 0, and finite, not 1"),
        (["--rate", "1", "--input", "0"], "at least 1 token"),
        (["--rate", "1", "--input", "1000000000000"], "at most 16,777,216"),
        (["--rate", "1e9"], "the traffic has 6e+10 requests in 60 s: at most 10,000,000 can be played"),
        (["--rate", "1e-300"], "the traffic has 1 requests in 1e+300 s"),
        (["--rate", "1", "--prefix", "100000000000"], "--prefix must be from 0 to 16,777,216 tokens"),
        (["--rate", "9", "--prefix", "16000000", "--prefixes", "99"], "have 1,584,000,000 tokens together"),
        (["--rate", "1", "--spread", "2"], "spread must be at least 0 and below 1"),
        (["--rate", "1", "--prefill", "0", "--decode", "0"], "node"),
        (["--rate", "1", "--machines", "0"], "--machines must be at least 1"),
        (["--rate", "1", "--machines", "9", "--one-machine"], "--one-machine one to all: give one of them"),
        (["--rate", "1", "-tp", "2"], "prefill nodes of TP 2, and the costs are of nodes of TP 1: profile such a node"),
        (["--rate", "1", "--traffic-seed", "-1"], "--traffic-seed must not be negative"),
        (["--trace", "nowhere.jsonl"], "--trace nowhere.jsonl cannot be read"),
        (["--trace", "node.json"], "node.json, line 1"),
        (["--rate", "1", "--decode-costs", "nowhere.json"], "nowhere.json cannot be read"),
        (["--rate", "1", "--decode-costs", "broken.json"], "broken.json is no file that `tandem profile` writes"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    costs: Path, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    (costs.parent / "broken.json").write_text('{"name": "x"}')
    assert main(["simulate", "--costs", str(costs), *given]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


BROKEN = {
    '{"timestamp": 0, "input_length": 5}\n': "output_length",
    '{"timestamp": 0, "input_length": -5, "output_length": 3}\n': "a prompt of -5 tokens",
    '{"timestamp": 0, "input_length": 5, "output_length": "x"}\n': "line 1",
    "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,480\n": "GeneratedTokens missing",
    "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,480,10\n": "line 2",
    MOONCAKE.replace("[0, 1]", "[0, -1]"): "hash ids must be from 0 to",
    MOONCAKE.replace("[0, 1]", "[0, 9876543210]"): "hash ids must be from 0 to",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n": "line 2",
    "a,b\n1,2\n": "missing",
    "\n": "neither a JSONL trace nor a CSV",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n": "contains no requests",
}


def test_a_broken_trace_is_one_sentence(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, words in BROKEN.items():
        assert main(["simulate", "--costs", str(costs), "--trace", write(costs.parent, line)]) == 1
        said = capsys.readouterr().err
        assert words in said
        assert len(said.strip().splitlines()) == 1


def test_the_first_requests_of_a_trace_are_played_step_by_step(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(costs.parent, MOONCAKE * 3)
    given = ("--requests", "2", "--step-by-step", "--prefill-costs", str(costs))
    report = simulated(costs, capsys, "--trace", file, *given)
    assert (report["requests"], report["prompt_tokens"]) == (2, 1200)


def test_prompts_by_chance_share_prefixes(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--rate", "2", "--duration", "3", "--input", "100", "--prefix", "400", "--prefixes", "2")
    report = simulated(costs, capsys, *given)
    assert report["prompt_tokens"] == report["requests"] * 500


def test_a_trace_is_played_faster_longer_and_by_more(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(costs.parent, MOONCAKE + MOONCAKE.replace('"timestamp": 0', '"timestamp": 8000'))
    given = ("--trace-speed", "2", "--trace-scale", "0.5", "--copies", "3")
    report = simulated(costs, capsys, "--trace", file, *given)
    assert (report["requests"], report["prompt_tokens"], report["output_tokens"]) == (6, 6 * 300, 6 * 2)
    assert 4 < report["seconds"] < 4 + 35


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_help_names_no_flag_that_means_nothing_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert "--host" not in said
    assert "--port" not in said
    assert said.index("--model") < said.index("--kv-memory") < said.index("--set KEY=VALUE [KEY=VALUE ...]\n")
