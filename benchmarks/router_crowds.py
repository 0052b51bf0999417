"""What other clients notice of clients that misbehave: the gaps between a stream's tokens, without and with such a crowd.

    python -m benchmarks.router_crowds [--seconds 6] [--json FILE]

32 streams of 20 ms per token are read as they come. In turn they run with: no other clients; 100 readers that stop reading; many clients that ask
and hang up; 500 connections whose headers never end; 1,000 strangers a second who connect to the decode node's and the router's internal ports
and begin CURVE's handshake there. For each it reports the gaps at the 50th and 99th percentile, the latter compared with the quiet run, and the
growth of the router's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks.router import PROMPT, child, running_engines, running_router
from tandem.loadgen.metrics import percentile
from tandem.wire.endpoints import parse_endpoint

STREAMS, STALLED, SLOW, STRANGERS = 32, 100, 500, 1_000
STEP_S = 0.02
MOST_TIMES = 2.0

Crowd = Callable[[str, list[str]], AbstractAsyncContextManager[None]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.router_crowds", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="for each crowd")
    parser.add_argument("--json", metavar="FILE", help="a file for the figures")
    options = parser.parse_args()
    rows = measure(int(options.seconds / STEP_S))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)
    return 0 if all(row["times_quiet"] < MOST_TIMES for row in rows) else 1


def measure(tokens: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    crowds: dict[str, Crowd] = {
        "no others": no_others,
        f"{STALLED} readers that stop": stalled,
        "a storm that hangs up": storm,
        f"{SLOW} headers without an end": slow_headers,
        f"{STRANGERS} strangers a second at internal ports": strangers,
    }
    with running_engines(step_s=STEP_S) as nodes, running_router(nodes, None) as (url, probe):
        asyncio.run(gaps(url, 20, no_others, []))  # warm-up: everything has been used once
        for name, crowd in crowds.items():
            before = probe("memory")
            doors = [nodes[1].request_endpoint, nodes.router_inbox]
            found = sorted(asyncio.run(gaps(url, tokens, crowd, doors)))
            p50, p99 = percentile(found, 50), percentile(found, 99)
            quiet = rows[0]["gap_ms_p99"] if rows else p99 * 1000
            rows.append(
                {
                    "crowd": name,
                    "gap_ms_p50": p50 * 1000,
                    "gap_ms_p99": p99 * 1000,
                    "times_quiet": p99 * 1000 / quiet,
                    "memory_mib": (probe("memory") - before) / 2**20,
                }
            )
    return rows


async def gaps(url: str, tokens: int, crowd: Crowd, doors: list[str]) -> list[float]:
    """Returns the gaps between two events of one stream, over all streams, while the crowd is there. `doors` are the internal ports of the
    decode node and the router."""
    async with crowd(url, doors):
        found = await asyncio.gather(*(read(url, tokens) for _ in range(STREAMS)))
    return list(itertools.chain.from_iterable(found))


async def read(url: str, tokens: int) -> list[float]:
    reader, writer = await ask(url, tokens)
    await reader.readuntil(b"\r\n\r\n")
    times: list[float] = []
    while size := int((await reader.readline()).strip(), 16):
        await reader.readexactly(size + 2)
        times.append(time.perf_counter())
    writer.close()
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def ask(
    url: str, tokens: int, *, receive_buffer: int | None = None, key: str = "", **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(connection, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=receive_buffer or 65536)
    body = {"model": "instant", "prompt": PROMPT, "max_tokens": tokens, "stream": True, **fields}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    head += f"authorization: Bearer {key}\r\n" if key else ""
    writer.write(head.encode() + b"\r\n" + data)
    await writer.drain()
    return reader, writer


@asynccontextmanager
async def no_others(url: str, doors: list[str]) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def stalled(url: str, doors: list[str]) -> AsyncIterator[None]:
    """The clients' buffers hold a few events; the rest waits in the router."""
    found = [await ask(url, 2_000, receive_buffer=4096) for _ in range(STALLED)]
    for _, writer in found:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    yield
    for _, writer in found:
        writer.transport.abort()


@asynccontextmanager
async def storm(url: str, doors: list[str]) -> AsyncIterator[None]:
    async def come_and_go(index: int) -> None:
        while True:
            _, writer = await ask(url, 1_000)
            await asyncio.sleep(0.1 + 0.01 * (index % 10))
            writer.transport.abort()

    tasks = [asyncio.create_task(come_and_go(index)) for index in range(8)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def slow_headers(url: str, doors: list[str]) -> AsyncIterator[None]:
    parts = urlsplit(url)
    writers = []
    for _ in range(SLOW):
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
        writers.append(writer)

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.5)
            for writer in writers:
                writer.write(b"a")

    task = asyncio.create_task(drip())
    yield
    task.cancel()
    for writer in writers:
        writer.transport.abort()


@asynccontextmanager
async def strangers(url: str, doors: list[str]) -> AsyncIterator[None]:
    """Runs in a process of its own. Strangers begin as a member would, but have no key."""
    with child(come_as_strangers, doors) as pipe:
        await asyncio.to_thread(pipe.recv)
        yield


def come_as_strangers(pipe: Connection, doors: list[str]) -> None:
    addresses = [(door.host, door.port) for door in map(parse_endpoint, doors) if door is not None]
    asyncio.run(_come(pipe, addresses))


async def _come(pipe: Connection, addresses: list[tuple[str, int]]) -> None:
    # ZMTP 3.1's greeting for CURVE, and a HELLO whose box was not made with any key.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    hello = b"\x04\xc8" + b"\x05HELLO\x01\x00" + bytes(72) + os.urandom(32) + bytes(8) + os.urandom(80)

    async def come(address: tuple[str, int]) -> None:
        _, writer = await asyncio.open_connection(*address)
        writer.write(greeting + hello)
        await asyncio.sleep(0.2)
        writer.transport.abort()

    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    began, came = loop.time(), 0
    pipe.send("coming")
    while not pipe.poll():
        while came < (loop.time() - began) * STRANGERS:
            task = asyncio.create_task(come(addresses[came % len(addresses)]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            came += 1
        await asyncio.sleep(0.005)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Others' streams, beside clients that behave badly", title_justify="left")
    for name in ("beside", "gap ms p50", "p99", "times the quiet one", "memory MiB"):
        table.add_column(name, justify="left" if name == "beside" else "right")
    for row in rows:
        table.add_row(
            row["crowd"],
            f"{row['gap_ms_p50']:.1f}",
            f"{row['gap_ms_p99']:.1f}",
            f"{row['times_quiet']:.2f}",
            f"{row['memory_mib']:+.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
