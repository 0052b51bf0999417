"""What other clients notice of the largest requests that are allowed: the gaps between the tokens of their streams.

    python -m benchmarks.router_worst [--tokens 1500] [--holds] [--json FILE]
    python -m benchmarks.router_worst --attacks [--seconds 10] [--json FILE]

32 streams of 20 ms per token are read as they come. In turn they run with: 128 plain requests; one request for 128 choices of as many tokens with
20 alternatives each, whole and as a stream, to either endpoint; bodies of the largest size that are expensive to parse. The limit: the gap at the
99th percentile is at most 50 ms above the one with the plain requests. The clients of the large requests are a process of their own, so that
their time is not counted as the router's.

With --attacks, one key or a stranger does the worst that limits allow (`router_attacks`), for so many seconds each, beside another key's
streams and small requests. The limits: the gap at the 99th percentile is at most 50 ms above a quiet run's, every small request of the other
key is answered, and the router takes no more memory than its limits say together. Beside them stands the longest time for which the
router's event loop was held (`router_beat`), which other work on the machine changes little.

With --holds the router runs in this process, and the figures are the CPU times of single turns of its event loop. They show what the router
itself adds to others' gaps, even on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.router import PROMPT, child, make_tokenizer, running_engines, running_router, until_ready
from benchmarks.router_attacks import (
    ATTACKS,
    CONNECTIONS,
    GREEDY,
    OTHER,
    SPECIAL,
    attack_for,
    connected,
    head,
    read_answer,
)
from benchmarks.router_crowds import ask
from benchmarks.router_engines import MODEL, Engines
from tandem.loadgen.metrics import percentile
from tandem.router.config import ApiKey, Limits, LocalPrefill, RouterConfig
from tandem.router.hosting import RouterHost
from tandem.wire.nodes import RouterInfo
from tandem.wire.sockets import public_key

STREAMS, WIDE, TOP = 32, 128, 20
STEP_S = 0.02
BAR_MS = 50.0
BODY_BYTES = (16 << 20) - 1024
BODIES = 4

Crowd = Callable[[str, int], Coroutine[Any, Any, None]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.router_worst", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tokens", type=int, default=1500, help="of each choice")
    parser.add_argument(
        "--only", metavar="NAME", help="beside the plain requests, only what has this in its name"
    )
    parser.add_argument("--json", metavar="FILE", help="a file for the figures")
    parser.add_argument("--holds", action="store_true", help="CPU time of the event loop's turns, not gaps")
    parser.add_argument("--attacks", action="store_true", help="one key, or a stranger, against another key")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    options = parser.parse_args()
    if options.attacks:
        attacked = measure_attacks(options.seconds, options.only or "")
        if options.json:
            Path(options.json).write_text(json.dumps(attacked, indent=1) + "\n")
        show_attacks(attacked)
        return 0 if all(row["held"] for row in attacked) else 1
    if options.holds:
        holds = measure_holds(options.tokens, options.only or "")
        if options.json:
            Path(options.json).write_text(json.dumps(holds, indent=1) + "\n")
        show_holds(holds)
        return 0 if all(row["longest_ms"] <= BAR_MS for row in holds) else 1
    rows = measure(options.tokens, options.only or "")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)
    return 0 if all(row["above_plain_ms"] <= BAR_MS for row in rows) else 1


def measure(tokens: int, only: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with running_engines(step_s=STEP_S) as nodes, running_router(nodes, None) as (url, probe):
        asyncio.run(beside(url, "plain", 20))  # warm-up: everything has been used once
        for name in ("plain", *(name for name in CROWDS if name != "plain" and only in name)):
            memory, cpu = probe("memory"), probe()
            found = sorted(asyncio.run(beside(url, name, tokens)))
            p99 = percentile(found, 99) * 1000
            rows.append(
                {
                    "crowd": name,
                    "gap_ms_p50": percentile(found, 50) * 1000,
                    "gap_ms_p99": p99,
                    "gap_ms_max": found[-1] * 1000,
                    "above_plain_ms": p99 - (rows[0]["gap_ms_p99"] if rows else p99),
                    "cpu_s": probe() - cpu,
                    "memory_mib": (probe("memory") - memory) / 2**20,
                }
            )
    return rows


async def beside(url: str, name: str, tokens: int) -> list[float]:
    """Returns the gaps between two events of one stream, over all streams, until the crowd has its answers."""
    found: list[float] = []
    streams = [asyncio.create_task(read(url, found)) for _ in range(STREAMS)]
    await asyncio.sleep(10 * STEP_S)
    found.clear()
    await asyncio.to_thread(wait_for_crowd, name, url, tokens)
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return found


def measure_holds(tokens: int, only: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, running_engines(step_s=STEP_S) as nodes:
        make_tokenizer(folder)
        return asyncio.run(_measure_holds(folder, nodes, tokens, only))


async def _measure_holds(folder: str, nodes: Engines, tokens: int, only: str) -> list[dict[str, Any]]:
    """Uses asyncio's own loop, because every turn of it goes through one method."""
    held: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        held.append(time.thread_time() - began)

    config = RouterConfig(
        tokenizer_path=folder,
        model_name=MODEL,
        port=0,
        local_prefill=LocalPrefill.NEVER,
        limits=Limits(inflight_per_node=4096),
    )
    host = RouterHost(msgspec.msgpack.encode(config))
    url = msgspec.msgpack.decode(await host.start(), type=RouterInfo).url
    nodes.admit(public_key())
    await host.set_members(msgspec.msgpack.encode(list(nodes)))
    await asyncio.to_thread(until_ready, url)
    rows: list[dict[str, Any]] = []
    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        for name in (name for name in CROWDS if only in name):
            await asyncio.to_thread(wait_for_crowd, name, url, 20)  # warm-up: everything has been used once
            held.clear()
            await asyncio.to_thread(wait_for_crowd, name, url, tokens)
            found = sorted(held)
            rows.append(
                {
                    "crowd": name,
                    "turns": len(found),
                    "p99_ms": percentile(found, 99) * 1000,
                    "longest_ms": found[-1] * 1000,
                }
            )
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        await host.stop()
    return rows


def wait_for_crowd(name: str, url: str, tokens: int) -> None:
    with child(crowd_process, name, url, tokens) as pipe:
        pipe.recv()


def measure_attacks(seconds: float, only: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    limits = Limits(connections=CONNECTIONS)
    keys = (ApiKey("greedy", GREEDY), ApiKey("other", OTHER))
    most_mib = (limits.body_bytes_at_once + limits.kept_bytes + limits.responses_bytes) / 2**20
    for name in (name for name in ATTACKS if only in name):
        # A router of its own for each: what one attack leaves behind is not the next one's.
        with (
            running_engines(step_s=STEP_S) as nodes,
            running_router(
                nodes, None, {"limits": limits, "api_keys": keys, "log_level": "error"}, [SPECIAL]
            ) as (url, probe),
        ):
            quiet, _, _, _ = asyncio.run(attacked_by(url, "", seconds / 2, probe))
            before = probe("memory")
            found, statuses, peak, hold = asyncio.run(attacked_by(url, name, seconds, probe))
        found.sort()
        quiet_ms, p99 = percentile(sorted(quiet), 99) * 1000, percentile(found, 99) * 1000
        refused = sum(status != 200 for status in statuses)
        memory_mib = (peak - before) / 2**20
        rows.append(
            {
                "attack": name,
                "quiet_ms_p99": quiet_ms,
                "gap_ms_p50": percentile(found, 50) * 1000,
                "gap_ms_p99": p99,
                "gap_ms_max": found[-1] * 1000,
                "above_quiet_ms": p99 - quiet_ms,
                "longest_hold_ms": hold * 1000,
                "asked": len(statuses),
                "answered": len(statuses) - refused,
                "memory_mib": memory_mib,
                "held": bool(statuses)
                and not refused
                and p99 - quiet_ms <= BAR_MS
                and memory_mib <= most_mib,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def attacked_by(
    url: str, name: str, seconds: float, probe: Callable[[str], float]
) -> tuple[list[float], list[int], float, float]:
    """Returns the other key's gaps, the statuses of its small requests (0: none came), the most memory, and the longest time for
    which the router's event loop was held."""
    found: list[float] = []
    statuses: list[int] = []
    peak = 0.0
    streams = [asyncio.create_task(read(url, found, OTHER)) for _ in range(STREAMS)]
    await asyncio.sleep(10 * STEP_S)
    found.clear()
    await asyncio.to_thread(probe, "hold")
    with child(attack_process, name, url, seconds) as pipe:
        while not pipe.poll():
            statuses.append(await ask_once(url))
            peak = max(peak, await asyncio.to_thread(probe, "memory"))
            await asyncio.sleep(0.1)
    hold = await asyncio.to_thread(probe, "hold")
    broken = sum(task.done() for task in streams)
    statuses += [0] * broken
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return found, statuses, peak, hold


async def ask_once(url: str) -> int:
    """Asks for two tokens on a new connection, as the other key."""
    data = json.dumps(completion(2)).encode()
    try:
        async with asyncio.timeout(30), connected(url) as (reader, writer):
            writer.write(head("POST", "/v1/completions", len(data), OTHER) + data)
            return await read_answer(reader)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return 0


def attack_process(pipe: Connection, name: str, url: str, seconds: float) -> None:
    async def attack() -> None:
        await (attack_for(url, name, seconds) if name else asyncio.sleep(seconds))
        pipe.send("done")
        os._exit(0)  # cancelling hundreds of clients takes time, in which they would go on

    asyncio.run(attack())


def show_attacks(rows: list[dict[str, Any]]) -> None:
    table = Table(
        title="Another key's streams and requests, beside one key or a stranger", title_justify="left"
    )
    for name in (
        "beside",
        "answered",
        "gap p99, quiet",
        "ms above",
        "longest",
        "loop held",
        "memory MiB",
        "held",
    ):
        table.add_column(name, justify="left" if name == "beside" else "right")
    for row in rows:
        table.add_row(
            row["attack"],
            f"{row['answered']} of {row['asked']}",
            f"{row['quiet_ms_p99']:.0f}",
            f"{row['above_quiet_ms']:+.0f}",
            f"{row['gap_ms_max']:.0f}",
            f"{row['longest_hold_ms']:.0f}",
            f"{row['memory_mib']:+.0f}",
            "yes" if row["held"] else "NO",
        )
    Console().print(table)


async def read(url: str, found: list[float], key: str = "") -> None:
    reader, writer = await ask(url, 1_000_000, key=key)
    try:
        await reader.readuntil(b"\r\n\r\n")
        last = time.perf_counter()
        while size := int((await reader.readline()).strip(), 16):
            await reader.readexactly(size + 2)
            now = time.perf_counter()
            found.append(now - last)
            last = now
    finally:
        writer.transport.abort()


def crowd_process(pipe: Connection, name: str, url: str, tokens: int) -> None:
    asyncio.run(CROWDS[name](url, tokens))
    pipe.send("done")


async def exchange(url: str, path: str, body: dict[str, object] | bytes, wanted: bytes = b"200") -> int:
    """Reads the answer and returns its size."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    start = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(start.encode() + data)
    status = await reader.readline()
    if wanted not in status:
        raise RuntimeError(f"the router answered {status!r}: {await reader.read(2000)!r}")
    size = 0
    while piece := await reader.read(1 << 20):
        size += len(piece)
    writer.close()
    return size


def completion(tokens: int, **fields: object) -> dict[str, object]:
    return {"model": "instant", "prompt": PROMPT, "max_tokens": tokens, "seed": 1, **fields}


def chat(tokens: int, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "instant", "messages": messages, "max_tokens": tokens, "seed": 1, **fields}


async def plain(url: str, tokens: int) -> None:
    await asyncio.gather(*(exchange(url, "/v1/completions", completion(tokens)) for _ in range(WIDE)))


def wide(path: str, body: Callable[..., dict[str, object]], **fields: object) -> Crowd:
    async def crowd(url: str, tokens: int) -> None:
        await exchange(url, path, body(tokens, n=WIDE, **fields))

    return crowd


def bodies(text: Callable[[], bytes]) -> Crowd:
    """Bodies of the largest size that is allowed. They are refused after they have been parsed."""

    async def crowd(url: str, tokens: int) -> None:
        data = text()
        await asyncio.gather(*(exchange(url, "/v1/completions", data, b"HTTP/1.1 4") for _ in range(BODIES)))

    return crowd


def _one_text() -> bytes:
    return b'{"model":"instant","max_tokens":0,"prompt":"' + b"a " * (BODY_BYTES // 2) + b'"}'


def _escapes() -> bytes:
    return b'{"model":"instant","max_tokens":0,"prompt":"' + rb"\u00e4" * (BODY_BYTES // 6) + b'"}'


def _numbers() -> bytes:
    return b'{"model":"instant","max_tokens":0,"prompt":[' + b"1," * (BODY_BYTES // 2) + b"1]}"


def _brackets() -> bytes:
    return b'{"model":"instant","max_tokens":0,"prompt":"' + b"[" * BODY_BYTES + b'"}'


def _names() -> bytes:
    names = b",".join(
        b'"%06x":1' % number for number in itertools.islice(itertools.count(), BODY_BYTES // 11)
    )
    return b'{"model":"instant","max_tokens":0,"prompt":"x","logit_bias":{' + names + b"}}"


CROWDS: dict[str, Crowd] = {
    "plain": plain,
    "completions, whole": wide("/v1/completions", completion, logprobs=TOP),
    "completions, streamed": wide("/v1/completions", completion, logprobs=TOP, stream=True),
    "chat, whole": wide("/v1/chat/completions", chat, logprobs=True, top_logprobs=TOP),
    "chat, streamed": wide("/v1/chat/completions", chat, logprobs=True, top_logprobs=TOP, stream=True),
    "body of one text": bodies(_one_text),
    "body of escapes": bodies(_escapes),
    "body of numbers": bodies(_numbers),
    "body of brackets": bodies(_brackets),
    "body of names": bodies(_names),
}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Others' streams, beside the largest requests", title_justify="left")
    for name in ("beside", "gap ms p50", "p99", "longest", "p99 above plain", "CPU s", "memory MiB"):
        table.add_column(name, justify="left" if name == "beside" else "right")
    for row in rows:
        table.add_row(
            row["crowd"],
            f"{row['gap_ms_p50']:.1f}",
            f"{row['gap_ms_p99']:.1f}",
            f"{row['gap_ms_max']:.0f}",
            f"{row['above_plain_ms']:+.1f}",
            f"{row['cpu_s']:.1f}",
            f"{row['memory_mib']:+.1f}",
        )
    Console().print(table)


def show_holds(rows: list[dict[str, Any]]) -> None:
    table = Table(title="CPU time of single turns of the router's event loop", title_justify="left")
    for name in ("beside", "turns", "ms p99", "longest"):
        table.add_column(name, justify="left" if name == "beside" else "right")
    for row in rows:
        table.add_row(row["crowd"], str(row["turns"]), f"{row['p99_ms']:.2f}", f"{row['longest_ms']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
