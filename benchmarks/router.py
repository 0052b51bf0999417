"""The router alone, with engines that answer instantly: what it adds to the first token, and what it costs per token.

    python -m benchmarks.router [--quick] [--json FILE]

Router, engines and clients are three processes. Costs are the router's own CPU time, so that other work on the machine does not change them; times
are what a client sees. Both are also given without what the same messages cost without a router: over bare sockets, and through a relay that
only receives and sends. On a virtual machine that sleeps between two tokens, waking up can cost more than everything that a router does. What an
idle router costs (pings, clocks) is measured first, and is not counted as the cost of tokens.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import threading
import time
from typing import Any

from benchmarks.lib.connections import HttpConnection
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.processes import child
from benchmarks.lib.tables import at_most, seen, table_of
from benchmarks.router_bed import (
    MODEL,
    PROMPT,
    Engines,
    Probe,
    answered,
    asked,
    read_relay,
    running_engines,
    running_router,
    serve_relay,
    streams,
)
from tandem.base.percentile import percentile
from tandem.wire.endpoints import key_of
from tandem.wire.lines import LetterToRouter, Lines
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import Submit, TokenBatch, ToRouter
from tandem.wire.sampling import SamplingParams
from tandem.wire.sockets import Inbox, Outbox, admit, public_key

IDLE_S = 3.0
CONNECTIONS, EACH = 32, 40  # of requests for one token
FLOOR_TTFT_MS = 3.0
FLOOR_TOKEN_US = 100.0
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


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    options = parser.parse_args()
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
            before = cpu_s()
            time.sleep(IDLE_S)
            idle = (cpu_s() - before) / IDLE_S  # the share of a core that a router without requests takes
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
                rate = asyncio.run(requests(url, prompt, new=new, chats=chats))
                spent = (cpu_s() - before) / (CONNECTIONS * EACH)
                figures["requests"][name] = {"per_s": rate, "cpu_us_per_request": spent * 1e6}
    return figures


async def requests(url: str, prompt: str, *, new: bool, chats: bool) -> float:
    """Returns how many whole answers of one token come per second. `new`: no two prompts are alike. `chats`: each is a user's message."""

    async def one() -> None:
        connection = await HttpConnection.to(url)
        for _ in range(EACH):
            text = f"{secrets.token_hex(8)} {prompt}" if new else prompt
            body: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
            body |= {"messages": [{"role": "user", "content": text}]} if chats else {"prompt": text}
            await answered(connection, "/v1/chat/completions" if chats else "/v1/completions", body)
        connection.abort()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return CONNECTIONS * EACH / (time.perf_counter() - began)


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
            before = asked(pipe, "cpu")
            asyncio.run(read_relay(port, count))
            costs.append(asked(pipe, "cpu") - before)
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


if __name__ == "__main__":
    run(main)
