"""Recorded traffic, in the two public formats.

Mooncake's JSONL has one line per request: `timestamp` in milliseconds, `input_length`, `output_length`, and `hash_ids`, one for
each 512 tokens of the prompt. Two prompts with equal ids have equal text up to that block. Azure's CSV has the columns TIMESTAMP,
ContextTokens and GeneratedTokens, and tells nothing about the text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from tandem.base.errors import ConfigurationError
from tandem.loadgen.vocabulary import Vocabulary, words_for
from tandem.loadgen.workload import MOST_REQUESTS, MOST_TOKENS, Session, single

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(file: Path, limit: int | None = None) -> list[TraceRow]:
    """Returns the first `limit` requests in order of arrival, the first one at 0 s. Raises ConfigurationError."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            is_json = lines.read(1) == "{"
            lines.seek(0)
            rows = list(
                islice(_mooncake(file, lines) if is_json else _azure(file, lines), limit and min(limit, MOST_REQUESTS))
            )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--trace {file} cannot be read: {error}") from error
    if not rows:
        raise ConfigurationError(f"--trace {file} contains no requests")
    rows.sort(key=lambda row: row.arrival_s)
    first = rows[0].arrival_s
    return [TraceRow(row.arrival_s - first, row.input_tokens, row.output_tokens, row.blocks) for row in rows]


def _mooncake(file: Path, lines: Iterator[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_MooncakeLine)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(f"{file}, line {number}: {error}") from error
        yield TraceRow(row.timestamp / 1e3, row.input_length, row.output_length, tuple(row.hash_ids))


def _azure(file: Path, lines: Iterator[str]) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    missing = [column for column in _AZURE_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigurationError(
            f"{file} is neither a JSONL trace nor a CSV with the columns {', '.join(_AZURE_COLUMNS)}: "
            f"{', '.join(missing)} missing"
        )
    for row in reader:
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"])
            yield TraceRow(moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{file}, line {reader.line_num}: {error}") from error


def refuse_too_long(rows: Sequence[TraceRow], scale: float) -> None:
    longest = scale * max((max(row.input_tokens, row.output_tokens) for row in rows), default=0)
    if longest > MOST_TOKENS:
        raise ConfigurationError(
            f"the trace's longest prompt or answer has {longest:.4g} tokens, with a --trace-scale of {scale:g}: at most {MOST_TOKENS:,} can be "
            "played"
        )


def replay(
    rows: list[TraceRow], vocabulary: Vocabulary, seed: int, speed: float = 1.0, scale: float = 1.0
) -> list[Session]:
    """Makes sessions of a trace. `speed` 2 sends it in half its time. `scale` 0.1 makes each length, and each shared block, a tenth as
    long, so that a small model can serve it and prompts still share what they shared."""
    if speed <= 0 or scale <= 0:
        raise ConfigurationError("a trace's speed and scale must be above 0")
    refuse_too_long(rows, scale)
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * scale))
    sessions = []
    for index, row in enumerate(rows):
        tokens = max(vocabulary.overhead + 1, round(row.input_tokens * scale))
        words = words_for(vocabulary, tokens)
        text: list[int] = []
        for block in row.blocks:
            if len(text) < words:
                text += vocabulary.draw(np.random.default_rng((seed, 0, block)), block_tokens)
        if len(text) < words:
            text += vocabulary.draw(np.random.default_rng((seed, 1, index)), words - len(text))
        output = max(1, round(row.output_tokens * scale))
        sessions.append(single(vocabulary.prompt(text[:words]), tokens, output, row.arrival_s / speed))
    return sessions
