"""Whether the load generator measures correctly, and how little time it takes itself.

    python -m benchmarks.load_generator

The server's every delay is known. Shows what the generator reports of each, and what a chunk costs the generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from benchmarks.lib.connections import serve
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.processes import child
from benchmarks.lib.servers import played
from benchmarks.lib.tables import at_most, seen, table_of
from tandem.base.errors import Unavailable
from tandem.loadgen.api import RequestShape
from tandem.loadgen.metrics import Summary, summarize
from tandem.loadgen.vocabulary import GuessedVocabulary
from tandem.loadgen.workload import Lengths, random_prompts

# The paced server's moments: most gaps are 12 ms, every tenth is 45 ms, and the first token comes after 160 ms.
FIRST_TOKEN_S, GAP_S, LONG_GAP_S, LONG_GAP_EVERY = 0.160, 0.012, 0.045, 10
MOST_OFF_PERCENT = 5.0
_USERS, _REQUESTS, _INPUT, _OUTPUT = 8, 64, 128, 64
_COLUMNS = {"figure": "{figure}", "known": "{known:.2f}", "tandem bench": "{ours:.2f}"}


def main() -> int:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    # In a process of its own, so that its time is not counted as the generator's.
    with child(serve_paced) as pipe:
        port = pipe.recv()
        summary, our_cost = asyncio.run(_ours(port))
    compared = _compare(summary)
    off = {row["figure"]: 100 * abs(row["ours"] / row["known"] - 1) for row in compared}
    worst = max(off, key=off.__getitem__)
    return report(
        options,
        {"compared": compared, "ours_us_per_chunk": our_cost},
        table_of(f"{_REQUESTS} requests by {_USERS} users, of a server that keeps time", compared, _COLUMNS),
        floors=[
            at_most(f"furthest from what is known: {worst}", off[worst], MOST_OFF_PERCENT, "%"),
            seen("CPU per chunk", our_cost, "µs"),
        ],
    )


async def _ours(port: int) -> tuple[Summary, float]:
    """Returns what the generator reports, and its processor time per chunk in microseconds."""
    sessions = random_prompts(GuessedVocabulary(), np.random.default_rng(0), _REQUESTS, Lengths(_INPUT, _OUTPUT))
    before = time.process_time()
    load = await played(f"http://127.0.0.1:{port}", RequestShape("paced"), sessions, users=_USERS)
    spent = time.process_time() - before
    summary = summarize("paced", load.timelines, load.duration_s)
    if summary.failed:
        raise Unavailable(f"{summary.failed} requests failed: {summary.failures[0].example}")
    return summary, spent / summary.output_tokens * 1e6


def _compare(summary: Summary) -> list[dict[str, Any]]:
    if not (summary.ttft_ms and summary.tpot_ms and summary.itl_ms):
        raise Unavailable("nothing was measured")
    gaps = [LONG_GAP_S if index % LONG_GAP_EVERY == 0 else GAP_S for index in range(_OUTPUT - 1)]
    per_token = sum(gaps) / len(gaps) * 1e3
    a_request = FIRST_TOKEN_S + sum(gaps)
    figures = {
        "time to first token, mean ms": (FIRST_TOKEN_S * 1e3, summary.ttft_ms.mean),
        "time to first token, p50 ms": (FIRST_TOKEN_S * 1e3, summary.ttft_ms.p50),
        "time per output token, mean ms": (per_token, summary.tpot_ms.mean),
        "time per output token, p50 ms": (per_token, summary.tpot_ms.p50),
        "inter-token latency, mean ms": (per_token, summary.itl_ms.mean),
        "inter-token latency, p50 ms": (GAP_S * 1e3, summary.itl_ms.p50),
        "inter-token latency, p99 ms": (LONG_GAP_S * 1e3, summary.itl_ms.p99),
        "output tokens/s": (_USERS * _OUTPUT / a_request, summary.output_tokens_per_s),
    }
    return [{"figure": name, "known": known, "ours": ours} for name, (known, ours) in figures.items()]


_TOKEN = (
    b'{"id":"cmpl-8f7c2b1e5d6a4c3b","object":"text_completion","created":1790000000,"model":"paced",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}'
)


class _PacedRequest(msgspec.Struct):
    max_tokens: int


def _event(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a connection's requests, one after another."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            asked = msgspec.json.decode(await reader.readexactly(length), type=_PacedRequest)
            await _stream(writer, asked.max_tokens)
    writer.close()


async def _stream(writer: asyncio.StreamWriter, tokens: int) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time() + FIRST_TOKEN_S
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for index in range(tokens):
        await asyncio.sleep(due - loop.time())
        writer.write(_event(_TOKEN))
        due += LONG_GAP_S if index % LONG_GAP_EVERY == 0 else GAP_S
    usage = msgspec.json.encode({"choices": [], "usage": {"completion_tokens": tokens}})
    writer.write(_event(usage) + _event(b"[DONE]") + b"0\r\n\r\n")


def serve_paced(pipe: Connection) -> None:
    """A server that only keeps time: the tokens of every answer come at moments that are known beforehand. So what a load generator reports can
    be checked, and the time that the generator itself takes is not hidden by a model's."""
    asyncio.run(serve(pipe, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), _answer)))


if __name__ == "__main__":
    run(main)
