from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.base.errors import ConfigurationError
from tandem.loadgen.traces import TraceRow, read_trace, replay
from tandem.loadgen.vocabulary import IdVocabulary, TextVocabulary
from tests.loadgen.made_tokenizers import byte_level, shared_beginning

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]},
    {"timestamp": 3052, "input_length": 700, "output_length": 20, "hash_ids": [0, 3]},
    {"timestamp": 3010, "input_length": 40, "output_length": 1, "hash_ids": [4]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in MOONCAKE) + "\n\n")
    return file


def test_a_mooncake_trace_begins_at_zero_and_is_in_order(mooncake: Path) -> None:
    rows = read_trace(mooncake)
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 0.010, 0.052])
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(1100, 52), (40, 1), (700, 20)]
    assert rows[0].blocks == (0, 1, 2)
    assert len(read_trace(mooncake, limit=2)) == 2


def test_an_azure_trace_begins_at_zero_and_has_no_blocks(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    first, second = read_trace(file)
    assert first == TraceRow(0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(0.052)
    assert (second.input_tokens, second.output_tokens, second.blocks) == (110, 27, ())
    file.write_text(
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01.009930+00:00,2399,6\n"
    )
    assert [row.arrival_s for row in read_trace(file)] == pytest.approx([0.0, 1.0]), "with a time zone and a mark"


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_trace(file)
    for text in (
        "",
        "a,b\n1,2\n",
        '{"timestamp": 0, "input_length": "long", "output_length": 1}\n',
        '{"timestamp": 0}\n',
        "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n",
    ):
        file.write_text(text)
        with pytest.raises(ConfigurationError):
            read_trace(file)


def test_replayed_prompts_have_the_recorded_lengths_and_share_what_was_shared(mooncake: Path) -> None:
    backend = byte_level()
    sessions = replay(read_trace(mooncake), TextVocabulary(backend), seed=1)
    turns = [session.turns[0] for session in sessions]
    long, short, other = (backend.encode(str(turn.prompt)).ids for turn in turns)
    assert [len(long), len(short), len(other)] == [1100, 40, 700]
    assert [turn.max_tokens for turn in turns] == [52, 1, 20]
    overhead = TextVocabulary(backend).overhead
    assert 512 <= shared_beginning(long, other) < 512 + overhead + 16
    assert shared_beginning(long, short) < 16
    assert [session.arrival_s for session in sessions] == pytest.approx([0.0, 0.010, 0.052])


def test_scaled_down_the_shared_part_shrinks_with_the_rest(mooncake: Path) -> None:
    sessions = replay(read_trace(mooncake), IdVocabulary(byte_level()), seed=1, speed=2.0, scale=0.125)
    long, short, other = (session.turns[0] for session in sessions)
    assert [long.prompt_tokens, short.prompt_tokens, other.prompt_tokens] == [138, 5, 88]
    assert 64 <= shared_beginning(long.prompt, other.prompt) < 72
    assert sessions[2].arrival_s == pytest.approx(0.026)


def test_without_blocks_nothing_is_shared() -> None:
    rows = [TraceRow(0.0, 100, 5), TraceRow(1.0, 100, 5)]
    first, second = (s.turns[0].prompt for s in replay(rows, IdVocabulary(byte_level()), seed=1))
    assert first[:16] != second[:16]
    for speed, scale in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        with pytest.raises(ConfigurationError):
            replay(rows, IdVocabulary(byte_level()), 0, speed, scale)
