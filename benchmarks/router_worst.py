"""What the worst that one key or a stranger can do costs a router's other clients.

    python -m benchmarks.router_worst [--seconds 10] [--only NAME] [--json FILE]

One key or a stranger does the worst that limits allow (`router_attacks`), for so many seconds each, beside another key's 32
streams of 20 ms per token and its small requests. The limits: the gap at the 99th percentile is at most 50 ms above a quiet run's, every
small request of the other key is answered, and the router takes no more memory than its limits say together.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.lib.connections import connected
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.processes import child
from benchmarks.lib.tables import table_of
from benchmarks.router_attacks import ATTACKS, CONNECTIONS, GREEDY, OTHER, SPECIAL, attack_for
from benchmarks.router_bed import MODEL, PROMPT, Probe, running_engines, running_router
from tandem.base.percentile import percentile
from tandem.router.config import ApiKey, Limits

STREAMS = 32
STEP_S = 0.02
BAR_MS = 50.0
ATTACK_COLUMNS = {
    "beside": "{attack}",
    "answered": "{answered} of {asked}",
    "gap p99, quiet": "{quiet_ms_p99:.0f}",
    "ms above": "{above_quiet_ms:+.0f}",
    "times": "{times_quiet:.2f}",
    "longest": "{gap_ms_max:.0f}",
    "memory MiB": "{memory_mib:+.0f}",
    "held": "{verdict}",
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", metavar="NAME", default="", help="only what has this in its name")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack (%(default)g)")
    options = parser.parse_args()
    rows = measure_attacks(options.seconds, options.only)
    title = "Another key's streams and requests, beside one key or a stranger"
    failed = any(row["verdict"] != "yes" for row in rows)
    return report(options, rows, table_of(title, rows, ATTACK_COLUMNS), failed=failed)


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


def completion(tokens: int, **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "seed": 1, **fields}


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
            found, statuses, peak = asyncio.run(attacked_by(url, doors, name, seconds, probe))
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
) -> tuple[list[float], list[int], float]:
    """Returns the other key's gaps, the statuses of its small requests (0: none came), and the most memory."""
    statuses: list[int] = []
    peak = 0.0
    async with beside_streams(url, OTHER) as (found, broken):
        with child(attack_process, url, doors, name, seconds) as pipe:
            while not pipe.poll():
                statuses.append(await ask_once(url))
                peak = max(peak, await asyncio.to_thread(probe, "memory"))
                await asyncio.sleep(0.1)
    return found, statuses + broken, peak


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
