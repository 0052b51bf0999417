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
    """When all lines of the job will be answered at the rate, in tokens, of those that are since `began`. A line that is
    not answered is expected to take as many tokens as one of its length did. None while no line is answered."""
    sums = {
        bool(row[0]): row[1:]
        for row in database.execute(
            "SELECT done > 0, count(*), sum(size), sum(size * size), sum(done), sum(size * done) FROM lines WHERE job = ? "
            "GROUP BY done > 0",
            (job,),
        )
    }
    if True not in sums:
        return None
    count, size, squares, tokens, products = map(float, sums[True])
    left, left_size = map(float, sums[False][:2]) if False in sums else (0.0, 0.0)
    spread = squares - size * size / count
    per_byte = max(0.0, (products - size * tokens / count) / spread) if spread > 0 else 0.0
    left_tokens = max(0.0, left * tokens / count + per_byte * (left_size - left * size / count))
    return math.ceil(now + left_tokens * max(now - began, 0.0) / tokens)
