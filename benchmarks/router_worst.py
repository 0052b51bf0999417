"""What the largest requests that are allowed, and the worst that one key or a stranger can do, cost a router's other clients.

    python -m benchmarks.router_worst [--tokens 1500] [--only NAME] [--json FILE]
    python -m benchmarks.router_worst --attacks [--seconds 10] [--only NAME] [--json FILE]

In turn come 128 plain requests; one request for 128 choices of as many tokens with 20 alternatives each, whole and as a stream, to either
endpoint; bodies of the largest size that are expensive to parse. The router runs in this process, and the figures are the CPU times of single
turns of its event loop: what the router itself adds to others' gaps, even on a busy machine. None may be above 50 ms.

With --attacks, one key or a stranger does the worst that limits allow (`router_attacks`), for so many seconds each, beside another key's 32
streams of 20 ms per token and its small requests. The limits: the gap at the 99th percentile is at most 50 ms above a quiet run's, every
small request of the other key is answered, and the router takes no more memory than its limits say together. Beside them stands the longest
time for which the router's event loop was held, which other work on the machine changes little.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from benchmarks.lib.connections import connected
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.processes import child
from benchmarks.lib.tables import table_of
from benchmarks.router_attacks import ATTACKS, CONNECTIONS, GREEDY, LARGE_BODIES, OTHER, SPECIAL, attack_for, large_body
from benchmarks.router_bed import (
    MODEL,
    PROMPT,
    Engines,
    Probe,
    make_tokenizer,
    router_config,
    running_engines,
    running_router,
    until_ready,
)
from tandem.loadgen.metrics import percentile
from tandem.router.config import ApiKey, Limits
from tandem.router.hosting import RouterHost
from tandem.wire.nodes import RouterInfo
from tandem.wire.sockets import public_key

STREAMS, WIDE, TOP = 32, 128, 20
STEP_S = 0.02
BAR_MS = 50.0
BODIES = 4
Crowd = Callable[[str, int], Awaitable[None]]
HELD_COLUMNS = {"beside": "{crowd}", "turns": "{turns}", "ms p99": "{p99_ms:.2f}", "longest": "{longest_ms:.1f}"}
ATTACK_COLUMNS = {
    "beside": "{attack}",
    "answered": "{answered} of {asked}",
    "gap p99, quiet": "{quiet_ms_p99:.0f}",
    "ms above": "{above_quiet_ms:+.0f}",
    "times": "{times_quiet:.2f}",
    "longest": "{gap_ms_max:.0f}",
    "loop held": "{longest_hold_ms:.0f}",
    "memory MiB": "{memory_mib:+.0f}",
    "held": "{verdict}",
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=1500, help="of each choice (%(default)s)")
    parser.add_argument("--only", metavar="NAME", default="", help="only what has this in its name")
    parser.add_argument("--attacks", action="store_true", help="one key, or a stranger, against another key")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack (%(default)g)")
    options = parser.parse_args()
    if options.attacks:
        rows = measure_attacks(options.seconds, options.only)
        title, columns = "Another key's streams and requests, beside one key or a stranger", ATTACK_COLUMNS
        held = all(row["verdict"] == "yes" for row in rows)
    else:
        rows = measure_holds(options.tokens, options.only)
        title, columns = "CPU time of single turns of the router's event loop", HELD_COLUMNS
        held = all(row["longest_ms"] <= BAR_MS for row in rows)
    return report(options, rows, table_of(title, rows, columns), failed=not held)


# --- others' streams ------------------------------------------------------------------------------------------


async def read(url: str, found: list[float], key: str) -> None:
    """Reads a stream without an end, and adds the gaps between its events."""
    async with connected(url) as connection:
        await connection.send("/v1/completions", completion(1_000_000, stream=True), key=key)
        last = 0.0
        async for _ in connection.pieces():
            now = time.perf_counter()
            if last:
                found.append(now - last)
            last = now


@asynccontextmanager
async def beside_streams(url: str, key: str) -> AsyncIterator[tuple[list[float], list[int]]]:
    """While it is entered, collects the gaps between two events of one stream, over all streams. Afterwards the second list has a zero for
    each stream that broke."""
    found: list[float] = []
    broken: list[int] = []
    streams = [asyncio.create_task(read(url, found, key)) for _ in range(STREAMS)]
    await asyncio.sleep(10 * STEP_S)
    found.clear()
    try:
        yield found, broken
    finally:
        broken += [0] * sum(task.done() for task in streams)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def gaps_of(found: list[float]) -> dict[str, float]:
    ascending = sorted(found)
    return {
        "gap_ms_p50": percentile(ascending, 50) * 1000,
        "gap_ms_p99": percentile(ascending, 99) * 1000,
        "gap_ms_max": ascending[-1] * 1000,
    }


# --- the largest requests -------------------------------------------------------------------------------------


def completion(tokens: int, **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "seed": 1, **fields}


def chat(tokens: int, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "seed": 1, **fields}


async def exchange(
    url: str, body: dict[str, object] | bytes, path: str = "/v1/completions", refused: bool = False
) -> None:
    async with connected(url, limit=1 << 20) as connection:
        await connection.send(path, body)
        status = (await connection.answer()).status
    if status // 100 != (4 if refused else 2):
        raise RuntimeError(f"the router answered with status {status}")


async def plain(url: str, tokens: int) -> None:
    await asyncio.gather(*(exchange(url, completion(tokens)) for _ in range(WIDE)))


def wide(path: str, body: Callable[..., dict[str, object]], **fields: object) -> Crowd:
    async def crowd(url: str, tokens: int) -> None:
        await exchange(url, body(tokens, n=WIDE, **fields), path)

    return crowd


def bodies(kind: str) -> Crowd:
    async def crowd(url: str, tokens: int) -> None:
        data = large_body(kind)
        await asyncio.gather(*(exchange(url, data, refused=True) for _ in range(BODIES)))

    return crowd


CROWDS: dict[str, Crowd] = {
    "plain": plain,
    "completions, whole": wide("/v1/completions", completion, logprobs=TOP),
    "completions, streamed": wide("/v1/completions", completion, logprobs=TOP, stream=True),
    "chat, whole": wide("/v1/chat/completions", chat, logprobs=True, top_logprobs=TOP),
    "chat, streamed": wide("/v1/chat/completions", chat, logprobs=True, top_logprobs=TOP, stream=True),
    **{f"body of {kind}": bodies(kind) for kind in LARGE_BODIES},
}


def wait_for_crowd(name: str, url: str, tokens: int) -> None:
    with child(crowd_process, name, url, tokens) as pipe:
        pipe.recv()


def crowd_process(pipe: Connection, name: str, url: str, tokens: int) -> None:
    async def crowd() -> None:
        await CROWDS[name](url, tokens)

    asyncio.run(crowd())
    pipe.send("done")


def measure_holds(tokens: int, only: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, running_engines(step_s=STEP_S) as nodes:
        make_tokenizer(folder)
        return asyncio.run(_measure_holds(folder, nodes, tokens, only))


async def _measure_holds(folder: str, nodes: Engines, tokens: int, only: str) -> list[dict[str, Any]]:
    """Uses asyncio's own loop, because every turn of it goes through one method."""
    held: list[float] = []
    turns: Any = asyncio.Handle
    run_one = turns._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run_one(handle)
        held.append(time.thread_time() - began)

    host = RouterHost(msgspec.msgpack.encode(router_config(folder)))
    url = msgspec.msgpack.decode(await host.start(), type=RouterInfo).url
    nodes.admit(public_key())
    await host.set_members(msgspec.msgpack.encode(list(nodes)))
    await asyncio.to_thread(until_ready, url)
    rows: list[dict[str, Any]] = []
    turns._run = timed
    try:
        for name in (name for name in CROWDS if only in name):
            await asyncio.to_thread(wait_for_crowd, name, url, 20)  # warm-up: everything has been used once
            held.clear()
            await asyncio.to_thread(wait_for_crowd, name, url, tokens)
            found = sorted(held)
            p99 = percentile(found, 99) * 1000
            rows.append({"crowd": name, "turns": len(found), "p99_ms": p99, "longest_ms": found[-1] * 1000})
    finally:
        turns._run = run_one
        await host.stop()
    return rows


# --- attacks --------------------------------------------------------------------------------------------------


def measure_attacks(seconds: float, only: str) -> list[dict[str, Any]]:
    limits = Limits(connections=CONNECTIONS)
    most_mib = (limits.body_bytes_at_once + limits.kept_bytes + limits.responses_bytes) / 2**20
    keys = (ApiKey("greedy", GREEDY), ApiKey("other", OTHER))
    settings = {"limits": limits, "api_keys": keys, "log_level": "error"}
    rows: list[dict[str, Any]] = []
    for name in (name for name in ATTACKS if only in name):
        # A router of its own for each: what one attack leaves behind is not the next one's.
        with (
            tempfile.TemporaryDirectory() as folder,
            running_engines(step_s=STEP_S) as nodes,
            running_router(nodes, settings | {"batches_folder": folder}, [SPECIAL]) as (url, probe),
        ):
            doors = [nodes[1].request_endpoint, nodes.router_inbox]
            quiet, *_ = asyncio.run(attacked_by(url, doors, "", seconds / 2, probe))
            before = probe("memory")
            found, statuses, peak, hold = asyncio.run(attacked_by(url, doors, name, seconds, probe))
        quiet_ms, gaps = gaps_of(quiet)["gap_ms_p99"], gaps_of(found)
        above, memory_mib = gaps["gap_ms_p99"] - quiet_ms, (peak - before) / 2**20
        answered = statuses.count(200)
        held = 0 < answered == len(statuses) and above <= BAR_MS and memory_mib <= most_mib
        rows.append(
            {
                "attack": name,
                "quiet_ms_p99": quiet_ms,
                **gaps,
                "above_quiet_ms": above,
                "times_quiet": gaps["gap_ms_p99"] / quiet_ms,
                "longest_hold_ms": hold * 1000,
                "asked": len(statuses),
                "answered": answered,
                "memory_mib": memory_mib,
                "verdict": "yes" if held else "NO",
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def attacked_by(
    url: str, doors: list[str], name: str, seconds: float, probe: Probe
) -> tuple[list[float], list[int], float, float]:
    """Returns the other key's gaps, the statuses of its small requests (0: none came), the most memory, and the longest time for
    which the router's event loop was held."""
    statuses: list[int] = []
    peak = 0.0
    async with beside_streams(url, OTHER) as (found, broken):
        await asyncio.to_thread(probe, "hold")
        with child(attack_process, url, doors, name, seconds) as pipe:
            while not pipe.poll():
                statuses.append(await ask_once(url))
                peak = max(peak, await asyncio.to_thread(probe, "memory"))
                await asyncio.sleep(0.1)
        hold = await asyncio.to_thread(probe, "hold")
    return found, statuses + broken, peak, hold


async def ask_once(url: str) -> int:
    """Asks for two tokens on a new connection, as the other key."""
    try:
        async with asyncio.timeout(30), connected(url) as connection:
            await connection.send("/v1/completions", completion(2), key=OTHER)
            return (await connection.answer()).status
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return 0


def attack_process(pipe: Connection, url: str, doors: list[str], name: str, seconds: float) -> None:
    async def attack() -> None:
        await (attack_for(url, doors, name, seconds) if name else asyncio.sleep(seconds))
        pipe.send("done")
        os._exit(0)  # cancelling hundreds of clients takes time, in which they would go on

    asyncio.run(attack())


if __name__ == "__main__":
    run(main)
