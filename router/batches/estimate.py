"""When a job will be done, as far as its lines so far tell."""

from __future__ import annotations

import math
import sqlite3

import msgspec


class _Usage(msgspec.Struct):
    """Of an answer in OpenAI's form or in Anthropic's."""

    total_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answers = msgspec.json.Decoder(_Answer)


def tokens_of(answer: bytes) -> int:
    """The tokens of a line's answer and its prompt; at least 1, because an error has none."""
    try:
        usage = _answers.decode(answer).usage or _Usage()
    except msgspec.DecodeError:
        return 1
    return max(1, usage.total_tokens, usage.input_tokens + usage.output_tokens)


def estimated_end(database: sqlite3.Connection, job: str, began: float, now: float) -> int | None:
    """When all lines of the job will be answered at the rate, in tokens, of what was done since `began`. A line that is not
    answered is expected to take as many tokens as one of its length did, and half of them if it is under way: as many lines as
    a tenth of a job may be. None while no line is answered."""
    sums = {
        row[0]: [float(number) for number in row[1:]]
        for row in database.execute(
            "SELECT CASE WHEN done > 0 THEN 'answered' WHEN worker IS NULL THEN 'waiting' ELSE 'under way' END AS kind, count(*), "
            "sum(size), sum(size * size), sum(done), sum(size * done) FROM lines WHERE job = ? GROUP BY kind",
            (job,),
        )
    }
    if "answered" not in sums:
        return None
    count, size, squares, tokens, products = sums["answered"]
    spread = squares - size * size / count
    per_byte = max(0.0, (products - size * tokens / count) / spread) if spread > 0 else 0.0

    def expected(kind: str) -> float:
        lines, length = sums[kind][:2] if kind in sums else (0.0, 0.0)
        return max(0.0, lines * tokens / count + per_byte * (length - lines * size / count))

    half = expected("under way") / 2
    return math.ceil(now + (expected("waiting") + half) * max(now - began, 0.0) / (tokens + half))
