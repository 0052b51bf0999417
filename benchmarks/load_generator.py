"""Whether the load generator measures correctly, and how little time it takes itself.

    python -m benchmarks.load_generator
    python -m benchmarks.load_generator --vllm DIR --peers FOLDER --tokenizer FOLDER

The server's every delay is known. Shows what the generator reports of each, what a chunk costs the generator, and what the same chunk costs
httpx. With --vllm, vLLM's own generator measures the same server: FOLDER has `bench.sh DIR TOKENIZER PORT INPUT OUTPUT REQUESTS USERS`, which
runs `vllm bench serve` and prints its report.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.paced_server import FIRST_TOKEN_S, GAP_S, LONG_GAP_EVERY, LONG_GAP_S
from tandem.base.errors import DeadlineExceeded, TandemError, Unavailable
from tandem.cluster.saving import write_json
from tandem.loadgen.api import Api, RequestShape
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.load import LoadStream
from tandem.loadgen.metrics import Summary, summarize
from tandem.loadgen.vocabulary import GuessedVocabulary
from tandem.loadgen.workload import Lengths, random_prompts

_USERS, _REQUESTS, _INPUT, _OUTPUT = 8, 64, 128, 64
_SERVER_WITHIN_S = 20.0
_PEER_WITHIN_S = 300.0
# Figures that both report, by the names in vLLM's output.
_PEERS_LINES = {
    "time to first token, mean ms": "Mean TTFT (ms)",
    "time to first token, p50 ms": "Median TTFT (ms)",
    "time per output token, mean ms": "Mean TPOT (ms)",
    "time per output token, p50 ms": "Median TPOT (ms)",
    "inter-token latency, mean ms": "Mean ITL (ms)",
    "inter-token latency, p50 ms": "Median ITL (ms)",
    "inter-token latency, p99 ms": "P99 ITL (ms)",
    "output tokens/s": "Output token throughput (tok/s)",
}


class GeneratorComparison(msgspec.Struct, frozen=True):
    figure: str
    known: float
    ours: float
    theirs: float | None = None


class Result(msgspec.Struct, frozen=True):
    compared: list[GeneratorComparison]
    ours_us_per_chunk: float
    httpx_us_per_chunk: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="a virtual environment with vLLM in it")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="the script that runs its generator")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="any model's folder, for vLLM's prompts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    peer = (options.vllm, options.peers, options.tokenizer)
    if any(peer) and not all(peer):
        parser.error("--vllm, --peers and --tokenizer belong together")
    try:
        with _paced_server() as port:
            summary, our_cost = asyncio.run(_ours(port))
            their_cost = asyncio.run(_httpx_cost(port))
            theirs = _vllms(port, *peer) if all(peer) else {}
    except TandemError as error:
        print(error, file=sys.stderr)
        return 1
    result = Result(_compare(summary, theirs), our_cost, their_cost)
    _show(result)
    if options.json is not None:
        write_json(result, options.json)
    return 0


@contextmanager
def _paced_server() -> Iterator[int]:
    """Runs the server in a process of its own, so that its time is not counted as the generator's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.paced_server", str(port)])
    try:
        _wait_until_it_listens(port, server)
        yield port
    finally:
        server.terminate()
        server.wait()


def _wait_until_it_listens(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SERVER_WITHIN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if server.poll() is not None:
                raise Unavailable("the paced server does not start") from None
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the paced server does not listen") from None
            time.sleep(0.05)


async def _ours(port: int) -> tuple[Summary, float]:
    """Returns what the generator reports, and its processor time per chunk in microseconds."""
    sessions = random_prompts(
        GuessedVocabulary(), np.random.default_rng(0), _REQUESTS, Lengths(_INPUT, _OUTPUT)
    )
    async with HttpClient(Address.of_url(f"http://127.0.0.1:{port}")) as http:
        load = LoadStream("paced", Api(http, RequestShape("paced")), sessions, concurrency=_USERS)
        before = time.process_time()
        await load.run()
        spent = time.process_time() - before
    summary = summarize("paced", load.timelines, load.duration_s)
    if summary.failed:
        raise Unavailable(f"{summary.failed} requests failed: {summary.failures[0].example}")
    return summary, spent / summary.output_tokens * 1e6


async def _httpx_cost(port: int) -> float:
    body = {"model": "paced", "prompt": "x", "max_tokens": _OUTPUT, "stream": True}

    async def ask(client: httpx.AsyncClient) -> int:
        times = []
        async with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    msgspec.json.decode(line[6:])
                    times.append(time.perf_counter())
        return len(times)

    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        before = time.process_time()
        chunks = 0
        for _ in range(_REQUESTS // _USERS):
            chunks += sum(await asyncio.gather(*(ask(client) for _ in range(_USERS))))
        return (time.process_time() - before) / chunks * 1e6


def _vllms(port: int, vllm: Path, peers: Path, tokenizer: Path) -> dict[str, float]:
    """Returns vLLM's report, by its own names."""
    numbers = [str(number) for number in (port, _INPUT, _OUTPUT, _REQUESTS, _USERS)]
    try:
        ran = subprocess.run(
            ["bash", str(peers / "bench.sh"), str(vllm), str(tokenizer), *numbers],
            capture_output=True,
            text=True,
            timeout=_PEER_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"vLLM's generator did not end within {_PEER_WITHIN_S:.0f} s") from error
    found = {
        name.strip(): float(value) for name, value in re.findall(r"^(.+?):\s+([\d.]+)\s*$", ran.stdout, re.M)
    }
    missing = set(_PEERS_LINES.values()) - set(found)
    if missing:
        raise Unavailable(
            f"vLLM's generator does not tell {', '.join(sorted(missing))}:\n{ran.stdout[-2000:]}"
        )
    return found


def _compare(summary: Summary, theirs: dict[str, float]) -> list[GeneratorComparison]:
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
    return [
        GeneratorComparison(name, known, ours, theirs.get(_PEERS_LINES[name]))
        for name, (known, ours) in figures.items()
    ]


def _show(result: Result) -> None:
    console = Console()
    table = Table(
        title=f"{_REQUESTS} requests by {_USERS} users, of a server that keeps time", title_justify="left"
    )
    table.add_column("figure")
    for column in ("known", "tandem bench", "vLLM's generator", "tandem bench / vLLM's"):
        table.add_column(column, justify="right")
    for each in result.compared:
        theirs = "–" if each.theirs is None else f"{each.theirs:.2f}"
        ratio = "–" if each.theirs is None else f"{each.ours / each.theirs:.3f}"
        table.add_row(each.figure, f"{each.known:.2f}", f"{each.ours:.2f}", theirs, ratio)
    console.print(table)
    console.print(
        f"Processor time for each chunk: {result.ours_us_per_chunk:.0f} µs; httpx: {result.httpx_us_per_chunk:.0f} µs"
    )


if __name__ == "__main__":
    sys.exit(main())
