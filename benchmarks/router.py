"""The router alone, with engines that answer instantly: what it adds to the first token, and what it costs per token.

    python -m benchmarks.router [--quick] [--json FILE]
    python -m benchmarks.router --processes 1,2,4    # only requests per second, by the number of router processes on one port
    python -m benchmarks.router --peer path/to/vllm-router [--peer path/to/sglang-router]    # beside published routers

Router, engines and clients are three processes. Costs are the router's own CPU time, so that other work on the machine does not change them; times
are what a client sees. Both are also given without what the same messages cost without a router: over bare sockets, and through a relay that
only receives and sends. On a virtual machine that sleeps between two tokens, waking up can cost more than everything that a router does. What an
idle router costs (pings, clocks) is measured first, and is not counted as the cost of tokens.

With --peer each router has one prefill node and one decode node behind it, which answer at once: Tandem's in messages of `wire/`, the peers' over
HTTP, as they expect. The same clients ask each for the same whole answers, then for the same streams. Tandem's router does what a peer leaves to
its engines: chat templates, tokenizing, detokenizing, stop strings, checking requests.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import secrets
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.lib.connections import HttpConnection, InstantServer, serve
from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.processes import child, cpu_of, free_port, wait_for
from benchmarks.lib.tables import at_most, seen, table_of
from benchmarks.router_bed import (
    MODEL,
    PROMPT,
    Engines,
    Probe,
    answered,
    make_tokenizer,
    read_relay,
    running_engines,
    running_router,
    serve_relay,
    serve_router,
    streams,
)
from tandem.base.errors import TandemError, Unavailable
from tandem.loadgen.metrics import percentile
from tandem.wire.endpoints import key_of
from tandem.wire.lines import LetterToRouter, Lines
from tandem.wire.nodes import NodeInfo, RouterInfo
from tandem.wire.requests import Submit, TokenBatch, ToRouter
from tandem.wire.sampling import SamplingParams
from tandem.wire.sockets import Inbox, Outbox, admit, public_key

IDLE_S = 3.0
FLOOR_TTFT_MS = 3.0
FLOOR_TOKEN_US = 100.0
PEER_START_S = 60.0
CONNECTIONS, EACH, TOKENS, STREAMS, STREAM_TOKENS = 32, 60, 16, 64, 32  # beside published routers
COLUMNS = {
    "streams": "{streams}",
    "CPU µs/token": "{cpu_us_per_token:.0f}",
    "of a relay": "{relay_us_per_token:.0f}",
    "added": "{added_us_per_token:.0f}",
    "CPU µs/request": "{cpu_us_per_request:.0f}",
    "events/token": "{events_per_token:.2f}",
    "TTFT ms p50": "{ttft_ms_p50:.1f}",
    "TTFT ms p99": "{ttft_ms_p99:.1f}",
}
PEER_COLUMNS = {
    "router": "{router}",
    "requests/s": "{requests_per_s:.0f}",
    "CPU µs/request": "{cpu_us_per_request:.0f}",
    "streamed tokens/s": "{streamed_tokens_per_s:.0f}",
    "CPU µs/stream": "{cpu_us_per_stream:.0f}",
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    parser.add_argument(
        "--processes", metavar="N,...", help="how many share a port, each number in turn; as many clients"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="COMMAND", help="vllm-router or sglang-router")
    options = parser.parse_args()
    if options.processes or options.peer:
        each = 200 if options.quick else 1000
        rows = [throughput(int(count), each) for count in (options.processes or "").split(",") if count]
        peers = beside(options.peer) if options.peer else []
        title = "Routers on the same work, before engines that answer at once"
        shown = [table_of("Router processes on one port", rows)] if rows else []
        shown += [table_of(title, peers, PEER_COLUMNS)] if peers else []
        return report(options, rows + peers, *shown)
    figures = measure(tokens=32 if options.quick else 128)
    floors = [at_most("added to the first token", figures["added_ttft_ms"], FLOOR_TTFT_MS, "ms")]
    floors += [
        at_most(f"CPU per token, {row['streams']} streams", row["added_us_per_token"], FLOOR_TOKEN_US, "µs")
        for row in figures["streams"]
    ]
    requests = [{"requests": name, **row} for name, row in figures["requests"].items()]
    floors += [seen(f"requests, {row['requests']}", row["per_s"], "per s") for row in requests]
    return report(
        options,
        figures,
        table_of("The router, before engines that answer instantly", figures["streams"], COLUMNS, left=0),
        table_of("Requests for one token, 32 at once", requests),
        f"first token: {figures['ttft_ms']:.2f} ms, {figures['bare_ttft_ms']:.2f} ms without a router; "
        f"{figures['idle_ms_per_s']:.2f} ms of CPU per second when idle",
        floors=floors,
    )


def measure(tokens: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"streams": [], "requests": {}}
    with running_engines(step_s=0.02) as nodes:
        nodes.admit(public_key())
        admit(key_of(node.request_endpoint) for node in nodes)
        bare = statistics.median(bare_first_token_s(nodes[0]) for _ in range(200)) * 1000
        with running_router(nodes) as (url, cpu_s):
            asyncio.run(streams(url, 4, 8))  # warm-up: everything has been used once
            one = statistics.median(asyncio.run(streams(url, 1, 2))[0].first_s * 1000 for _ in range(100))
            idle = idle_share(cpu_s)
            figures |= {"bare_ttft_ms": bare, "ttft_ms": one, "added_ttft_ms": one - bare, "idle_ms_per_s": idle * 1000}
            for count in (1, 64, 512):
                row = measure_streams(url, cpu_s, count, tokens, idle)
                row["relay_us_per_token"] = relay_us_per_token(nodes, count, tokens)
                row["added_us_per_token"] = row["cpu_us_per_token"] - row["relay_us_per_token"]
                figures["streams"].append(row)
            for name, prompt, new, chats in (
                ("the prompt was met before", PROMPT, False, False),
                ("new prompts", PROMPT, True, False),
                ("new chats", PROMPT, True, True),
                ("short new chats", PROMPT[:90], True, True),
            ):
                before = cpu_s()
                rate = asyncio.run(requests(url, 32, 40, prompt, 1, new=new, chats=chats))
                spent = (cpu_s() - before) / (32 * 40)
                figures["requests"][name] = {"per_s": rate, "cpu_us_per_request": spent * 1e6}
    return figures


async def requests(
    url: str,
    connections: int,
    each: int,
    prompt: str = PROMPT,
    tokens: int = 1,
    *,
    new: bool = False,
    chats: bool = False,
) -> float:
    """Returns how many whole answers per second come over this many connections. `new`: no two prompts are alike. `chats`: each is a user's
    message."""

    async def one() -> None:
        connection = await HttpConnection.to(url)
        for _ in range(each):
            text = f"{secrets.token_hex(8)} {prompt}" if new else prompt
            body: dict[str, Any] = {"model": MODEL, "max_tokens": tokens}
            body |= {"messages": [{"role": "user", "content": text}]} if chats else {"prompt": text}
            await answered(connection, "/v1/chat/completions" if chats else "/v1/completions", body)
        connection.abort()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(connections)))
    return connections * each / (time.perf_counter() - began)


def throughput(processes: int, each: int) -> dict[str, float]:
    """Returns requests for one token per second, from as many client processes as router processes. To grow with `processes` it needs three
    cores for each of them."""
    with running_engines(step_s=0.02) as nodes, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_tokenizer(folder)
        door, url, pipes = "", "", []
        for _ in range(processes):
            pipe = stack.enter_context(child(serve_router, folder, list(nodes), door))
            info: RouterInfo = pipe.recv()
            nodes.admit(key_of(info.inbox_endpoint))
            door, url = info.door, info.url
            pipes.append(pipe)
        for pipe in pipes:
            while not _asked(pipe, "accepts"):
                time.sleep(0.01)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as clients:
            # Warm-up: everything has been used once
            list(clients.map(_client, [url] * processes, [20] * processes))
            before = [_asked(pipe, "cpu") for pipe in pipes]
            rates = list(clients.map(_client, [url] * processes, [each] * processes))
        cpu_s = [_asked(pipe, "cpu") - earlier for pipe, earlier in zip(pipes, before, strict=True)]
    return {
        "processes": processes,
        "requests_per_s": sum(rates),
        "cpu_us_per_request": sum(cpu_s) / (16 * each * processes) * 1e6,
        "busiest_share_of_cpu": max(cpu_s) / sum(cpu_s),
    }


def _client(url: str, each: int) -> float:
    return asyncio.run(requests(url, 16, each))


def _asked(pipe: Connection, what: str) -> float:
    pipe.send(what)
    return float(pipe.recv())


def idle_share(cpu_s: Probe) -> float:
    """Returns the share of a core that a router without requests takes."""
    before, began = cpu_s(), time.perf_counter()
    time.sleep(IDLE_S)
    return (cpu_s() - before) / (time.perf_counter() - began)


def measure_streams(url: str, cpu_s: Probe, count: int, tokens: int, idle: float) -> dict[str, Any]:
    costs = []
    # First the same requests with two tokens each: a request's cost must not count as its tokens' cost.
    for length in (2, tokens):
        before, began = cpu_s(), time.perf_counter()
        answers = asyncio.run(streams(url, count, length))
        costs.append(cpu_s() - before - idle * (time.perf_counter() - began))
    first = sorted(answer.first_s for answer in answers)
    return {
        "streams": count,
        "tokens": tokens,
        "cpu_us_per_token": (costs[1] - costs[0]) / (count * (tokens - 2)) * 1e6,
        "cpu_us_per_request": costs[0] / count * 1e6,
        "events_per_token": sum(answer.events for answer in answers) / (count * tokens),
        "ttft_ms_p50": percentile(first, 50) * 1000,
        "ttft_ms_p99": percentile(first, 99) * 1000,
    }


def relay_us_per_token(nodes: Engines, count: int, tokens: int) -> float:
    with child(serve_relay, nodes[1], tokens) as pipe:
        port, key = pipe.recv()
        nodes.admit(key)
        costs = []
        for _ in range(2):  # the first one is a warm-up
            before = _asked(pipe, "cpu")
            asyncio.run(read_relay(port, count))
            costs.append(_asked(pipe, "cpu") - before)
    return costs[-1] / (count * tokens) * 1e6


def bare_first_token_s(node: NodeInfo) -> float:
    """Returns the time from a Submit to its first token over the same sockets, without a router."""
    arrived = threading.Event()

    def on_message(message: ToRouter) -> None:
        if isinstance(message, TokenBatch):
            arrived.set()

    outbox = Outbox()
    lines: Lines[ToRouter] = Lines(1, outbox.send_frame, on_message, meets_strangers=False, lock=threading.Lock())
    inbox: Inbox[LetterToRouter] = Inbox("127.0.0.1", LetterToRouter, lines.receive, name="bare")
    lines.endpoint = inbox.endpoint
    lines.meet(node.request_endpoint, node.epoch)
    try:
        for _ in range(2):  # the first one is a warm-up
            arrived.clear()
            began = time.perf_counter()
            sampling = SamplingParams(max_tokens=1)
            lines.send(
                node.request_endpoint,
                Submit("bare", inbox.endpoint, 5.0, prompt_token_ids=[1] * 128, sampling=sampling),
            )
            if not arrived.wait(5):
                raise RuntimeError("the engine did not answer")
        return time.perf_counter() - began
    finally:
        outbox.close()
        inbox.close()


# --- beside published routers ---------------------------------------------------------------------------------


def beside(peers: list[str]) -> list[dict[str, Any]]:
    with running_engines(step_s=0.0) as nodes, running_router(nodes) as (url, probe):
        rows = [compared("tandem", url, probe)]
    for peer in peers:
        try:
            with running_peer(peer) as (url, cpu):
                rows.append(compared(Path(peer).name, url, cpu))
        except TandemError as error:  # the others are still measured
            say(f"{peer}: {error}")
    return rows


def compared(name: str, url: str, cpu: Callable[[], float]) -> dict[str, Any]:
    asyncio.run(requests(url, 4, 10, tokens=TOKENS))  # warm-up: everything has been used once
    before = cpu()
    per_s = asyncio.run(requests(url, CONNECTIONS, EACH, tokens=TOKENS))
    whole = cpu() - before
    before, began = cpu(), time.perf_counter()
    asyncio.run(streams(url, STREAMS, STREAM_TOKENS))
    took = time.perf_counter() - began
    return {
        "router": name,
        "requests_per_s": per_s,
        "cpu_us_per_request": whole / (CONNECTIONS * EACH) * 1e6,
        "streamed_tokens_per_s": STREAMS * STREAM_TOKENS / took,
        "cpu_us_per_stream": (cpu() - before) / STREAMS * 1e6,
    }


@contextmanager
def running_peer(command: str) -> Iterator[tuple[str, Callable[[], float]]]:
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
            wait_for(lambda: answers(url, process), PEER_START_S, "it does not answer")
            yield url, lambda: cpu_of(process.pid)  # a peer starts no other processes
        finally:
            process.terminate()
            process.wait(20)


def answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise Unavailable(f"it ended with status {process.returncode}")
    try:
        asyncio.run(requests(url, 1, 1, tokens=2))
        return True
    except (OSError, RuntimeError, asyncio.IncompleteReadError):
        return False


class HttpEngine(InstantServer):
    """The part of a vLLM server that a router uses. It answers at once."""

    def answer(self, path: bytes, body: bytes) -> None:
        if not path.startswith(b"/v1/completions"):
            models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            self.whole(models if b"models" in path else {"status": "ok", "model_id": MODEL})
            return
        asked = json.loads(body)
        count = asked.get("max_tokens", 1)
        if not asked.get("stream"):
            self.whole(_choice("x" * count, "length") | {"kv_transfer_params": {}})
            return
        self.begin_stream()
        for index in range(count):
            self.event(json.dumps(_choice("x", "length" if index == count - 1 else None)).encode())
        self.end_stream()


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}


def serve_http_engine(pipe: Connection) -> None:
    uvloop.run(serve(pipe, HttpEngine))


if __name__ == "__main__":
    run(main)
