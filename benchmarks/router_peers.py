"""Requests per second of Tandem's router and of published routers, with the same work in the same run.

    python -m benchmarks.router_peers --peer path/to/vllm-router [--peer path/to/sglang-router] [--json FILE]

Each router has one prefill node and one decode node behind it, which answer at once: Tandem's in messages of `wire/`, the peers' over HTTP, as
they expect. The same clients ask each router for the same whole answers, then for the same streams. Tandem's router does what a peer leaves to its
engines: chat templates, tokenizing, detokenizing, stop strings, checking requests. The CPU column shows the time that both take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.router import PROMPT, child, running_engines, running_router
from benchmarks.router_load import requests, streams

CONNECTIONS, EACH, TOKENS = 32, 60, 16
STREAMS, STREAM_TOKENS = 64, 32
START_S = 60.0

Cpu = Callable[[], float]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.router_peers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="COMMAND", help="vllm-router or sglang-router"
    )
    parser.add_argument("--json", metavar="FILE", help="a file for the figures")
    options = parser.parse_args()
    rows = []
    with running_engines(step_s=0.0) as nodes, running_router(nodes, None) as (url, probe):
        rows.append(measure("tandem", url, probe))
    for peer in options.peer:
        try:
            with running_peer(peer) as (url, cpu):
                rows.append(measure(Path(peer).name, url, cpu))
        except PeerFailed as error:
            print(error, file=sys.stderr)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)
    return 0


def measure(name: str, url: str, cpu: Cpu) -> dict[str, Any]:
    asyncio.run(requests(url, 4, 10, PROMPT, TOKENS))  # warm-up: everything has been used once
    before = cpu()
    per_s = asyncio.run(requests(url, CONNECTIONS, EACH, PROMPT, TOKENS))
    whole = cpu() - before
    before, began = cpu(), time.perf_counter()
    asyncio.run(streams(url, STREAMS, STREAM_TOKENS, PROMPT))
    took = time.perf_counter() - began
    return {
        "router": name,
        "requests_per_s": per_s,
        "cpu_us_per_request": whole / (CONNECTIONS * EACH) * 1e6,
        "streamed_tokens_per_s": STREAMS * STREAM_TOKENS / took,
        "cpu_us_per_stream": (cpu() - before) / STREAMS * 1e6,
    }


class PeerFailed(Exception):
    """The peer did not start, or not in time. The others are still measured."""


@contextmanager
def running_peer(command: str) -> Iterator[tuple[str, Cpu]]:
    """Runs the peer in its mode for disaggregation: a request goes to the prefill server for one token, then to the decode server."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(child(serve_http_engine)) for _ in range(2)]
        prefill, decode = (f"http://127.0.0.1:{pipe.recv()}" for pipe in pipes)
        port = free_port()
        vllm = "vllm" in Path(command).name
        mode = ["--vllm-pd-disaggregation"] if vllm else ["launch", "--pd-disaggregation"]
        process = subprocess.Popen(
            [
                command, *mode, "--prefill", prefill, "--decode", decode, "--host", "127.0.0.1",
                "--port", str(port), "--policy", "round_robin", "--prometheus-port", str(free_port()),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            until_it_answers(url, process)
            yield url, lambda: cpu_of(process.pid)
        finally:
            process.terminate()
            process.wait(20)


def until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            asyncio.run(requests(url, 1, 1, PROMPT, 2))
            return
        except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise PeerFailed(f"{process.args!r} does not answer: {error}") from error
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_of(pid: int) -> float:
    """Returns the seconds that a process and its threads have taken. A peer starts no other processes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- an engine over HTTP that answers at once -----------------------------------------------------------------


class HttpEngine(asyncio.Protocol):
    """The part of a vLLM server that a router uses."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            head, found, rest = self._data.partition(b"\r\n\r\n")
            if not found:
                return
            length = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line[15:])
            if len(rest) < length:
                return
            body, self._data = rest[:length], rest[length:]
            words = head.split(b" ", 2)
            if len(words) < 3 or words[1] == b"*":  # a peer asks whether this speaks HTTP/2
                self._transport.close()
                return
            self._answer(words[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if not path.startswith(b"/v1/completions"):
            models = {"object": "list", "data": [{"id": "instant", "object": "model"}]}
            self._whole(models if b"models" in path else {"status": "ok", "model_id": "instant"})
            return
        asked = json.loads(body)
        count = asked.get("max_tokens", 1)
        if not asked.get("stream"):
            self._whole(self._choice("x" * count, "length") | {"kv_transfer_params": {}})
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for index in range(count):
            self._chunk(
                b"data: " + json.dumps(self._choice("x", "length" if index == count - 1 else None)).encode()
            )
        self._chunk(b"data: [DONE]")
        self._transport.write(b"0\r\n\r\n")

    def _chunk(self, event: bytes) -> None:
        self._transport.write(b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event))

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "instant",
            "choices": [choice],
        }

    def _whole(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


def serve_http_engine(pipe: Connection) -> None:
    uvloop.run(_serve_http_engine(pipe))


async def _serve_http_engine(pipe: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(HttpEngine, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    try:
        await asyncio.to_thread(pipe.recv)
    except EOFError:
        return


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Routers on the same work, before engines that answer at once", title_justify="left")
    for name in ("router", "requests/s", "CPU µs/request", "streamed tokens/s", "CPU µs/stream"):
        table.add_column(name, justify="left" if name == "router" else "right")
    for row in rows:
        table.add_row(
            row["router"],
            f"{row['requests_per_s']:.0f}",
            f"{row['cpu_us_per_request']:.0f}",
            f"{row['streamed_tokens_per_s']:.0f}",
            f"{row['cpu_us_per_stream']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
