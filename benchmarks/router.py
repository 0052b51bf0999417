"""The router alone, with engines that answer instantly: what it adds to the first token, and what it costs per token.

    python -m benchmarks.router [--quick] [--json FILE]
    python -m benchmarks.router --processes 1,2,4    # only requests per second, by the number of router processes on one port

Router, engines and clients are three processes. Costs are the router's own CPU time, so that other work on the machine does not change them; times
are what a client sees. Both are also given without what the same messages cost without a router: over bare sockets, and through a relay that
only receives and sends. On a virtual machine that sleeps between two tokens, waking up can cost more than everything that a router does. What an
idle router costs (pings, clocks) is measured first, and is not counted as the cost of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import uvloop
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.router_beat import LoopBeat
from benchmarks.router_engines import MODEL, Engines, serve_engines
from benchmarks.router_load import RouterAnswer, requests, streams
from benchmarks.router_relay import read_relay, serve_relay
from tandem.loadgen.metrics import percentile
from tandem.router.config import Limits, LocalPrefill, RouterConfig
from tandem.router.hosting import RouterHost
from tandem.wire.endpoints import key_of
from tandem.wire.lines import LetterToRouter, Lines
from tandem.wire.nodes import NodeInfo, RouterInfo, RouterQueue
from tandem.wire.requests import Submit, TokenBatch, ToRouter
from tandem.wire.sampling import SamplingParams
from tandem.wire.sockets import Inbox, Outbox, admit, public_key

IDLE_S = 3.0
START_S = 10.0
FLOOR_TTFT_MS = 3.0
FLOOR_TOKEN_US = 100.0
PROMPT = "the quick brown fox jumps over the lazy dog " * 12


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.router", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    parser.add_argument("--profile", metavar="FILE", help="where to write the router's profile")
    parser.add_argument("--json", metavar="FILE", help="a file for the figures")
    parser.add_argument(
        "--processes", metavar="N,...", help="how many share a port, each number in turn; as many clients"
    )
    options = parser.parse_args()
    if options.processes:
        rows = [
            throughput(int(count), 200 if options.quick else 1000) for count in options.processes.split(",")
        ]
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
        for row in rows:
            Console().print(row)
        return 0
    figures = measure(tokens=32 if options.quick else 128, profile=options.profile)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    show(figures)
    kept = figures["added_ttft_ms"] < FLOOR_TTFT_MS and all(
        row["added_us_per_token"] < FLOOR_TOKEN_US for row in figures["streams"]
    )
    return 0 if kept else 1


def measure(tokens: int, profile: str | None) -> dict[str, Any]:
    figures: dict[str, Any] = {"streams": []}
    with running_engines(step_s=0.02) as nodes:
        nodes.admit(public_key())
        admit(key_of(node.request_endpoint) for node in nodes)
        bare = statistics.median(bare_first_token_s(nodes[0]) for _ in range(200)) * 1000
        with running_router(nodes, profile) as (url, cpu_s):
            asyncio.run(streams(url, 4, 8, PROMPT))  # warm-up: everything has been used once
            one = [asyncio.run(streams(url, 1, 2, PROMPT))[0].first_s * 1000 for _ in range(100)]
            figures["bare_ttft_ms"] = bare
            figures["ttft_ms"] = statistics.median(one)
            figures["added_ttft_ms"] = statistics.median(one) - bare
            idle = idle_share(cpu_s)
            figures["idle_ms_per_s"] = idle * 1000
            for count in (1, 64, 512):
                row = measure_streams(url, cpu_s, count, tokens, idle)
                row["relay_us_per_token"] = relay_us_per_token(nodes, count, tokens)
                row["added_us_per_token"] = row["cpu_us_per_token"] - row["relay_us_per_token"]
                figures["streams"].append(row)
            each = 40
            for name, prompt, new_prompts, chats in (
                ("", PROMPT, False, False),
                ("_of_a_new_prompt", PROMPT, True, False),
                ("_of_a_new_chat", PROMPT, True, True),
                ("_of_a_short_new_chat", PROMPT[:90], True, True),
            ):
                before = cpu_s()
                rate = asyncio.run(requests(url, 32, each, prompt, 1, new_prompts=new_prompts, chats=chats))
                figures[f"requests_per_s{name}"] = rate
                figures[f"cpu_us_per_request{name}"] = (cpu_s() - before) / (32 * each) * 1e6
    return figures


def throughput(processes: int, each: int) -> dict[str, float]:
    """Returns requests for one token per second, from as many client processes as router processes. To grow with `processes` it needs three
    cores for each of them."""
    with running_engines(step_s=0.02) as nodes, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_tokenizer(folder)
        door, url, pipes = "", "", []
        for _ in range(processes):
            pipe = stack.enter_context(child(serve_router, folder, list(nodes), None, door))
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
            list(clients.map(ask, [url] * processes, [20] * processes))
            before = [_asked(pipe, "cpu") for pipe in pipes]
            rates = list(clients.map(ask, [url] * processes, [each] * processes))
        cpu_s = [_asked(pipe, "cpu") - earlier for pipe, earlier in zip(pipes, before, strict=True)]
    return {
        "processes": processes,
        "requests_per_s": sum(rates),
        "cpu_us_per_request": sum(cpu_s) / (16 * each * processes) * 1e6,
        "busiest_share_of_cpu": max(cpu_s) / sum(cpu_s),
    }


def ask(url: str, each: int) -> float:
    return float(asyncio.run(requests(url, 16, each, PROMPT, 1)))


def _asked(pipe: Connection, what: str) -> float:
    pipe.send(what)
    return float(pipe.recv())


def idle_share(cpu_s: Any) -> float:
    """Returns the share of a core that a router without requests takes."""
    before, began = cpu_s(), time.perf_counter()
    time.sleep(IDLE_S)
    return float((cpu_s() - before) / (time.perf_counter() - began))


def measure_streams(url: str, cpu_s: Any, count: int, tokens: int, idle: float) -> dict[str, Any]:
    answers: list[RouterAnswer] = []

    def cost_of(tokens: int) -> float:
        nonlocal answers
        before, began = cpu_s(), time.perf_counter()
        answers = asyncio.run(streams(url, count, tokens, PROMPT))
        return float(cpu_s() - before - idle * (time.perf_counter() - began))

    # The same requests with one token each: a request's cost must not count as its tokens' cost.
    without = cost_of(2)
    with_streams = cost_of(tokens)
    first = sorted(answer.first_s for answer in answers)
    return {
        "streams": count,
        "tokens": tokens,
        "cpu_us_per_token": (with_streams - without) / (count * (tokens - 2)) * 1e6,
        "cpu_us_per_request": without / count * 1e6,
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
            pipe.send("cpu")
            before = float(pipe.recv())
            asyncio.run(read_relay(port, count))
            pipe.send("cpu")
            costs.append(float(pipe.recv()) - before)
    return costs[-1] / (count * tokens) * 1e6


def bare_first_token_s(node: NodeInfo) -> float:
    """Returns the time from a Submit to its first token over the same sockets, without a router."""
    arrived = threading.Event()

    def on_message(message: ToRouter) -> None:
        if isinstance(message, TokenBatch):
            arrived.set()

    outbox = Outbox()
    lines: Lines[ToRouter] = Lines(
        1, outbox.send_frame, on_message, meets_strangers=False, lock=threading.Lock()
    )
    inbox: Inbox[LetterToRouter] = Inbox("127.0.0.1", LetterToRouter, lines.receive, name="bare")
    lines.endpoint = inbox.endpoint
    lines.meet(node.request_endpoint, node.epoch)
    try:
        for warm in (True, False):
            arrived.clear()
            began = time.perf_counter()
            sampling = SamplingParams(max_tokens=1)
            lines.send(
                node.request_endpoint,
                Submit("bare", inbox.endpoint, 5.0, prompt_token_ids=[1] * 128, sampling=sampling),
            )
            if not arrived.wait(5):
                raise RuntimeError("the engine did not answer")
            if not warm:
                return time.perf_counter() - began
    finally:
        outbox.close()
        inbox.close()
    raise AssertionError


@contextmanager
def running_engines(step_s: float) -> Iterator[Engines]:
    with child(serve_engines, step_s) as pipe:
        yield Engines(pipe)


@contextmanager
def running_router(
    nodes: Engines,
    profile: str | None,
    settings: dict[str, Any] | None = None,
    special: Sequence[str] = (),
) -> Iterator[tuple[str, Any]]:
    """`settings`: the router's, besides those of all benchmarks. `special`: the tokenizer's special tokens."""
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(folder, special)
        with child(serve_router, folder, list(nodes), profile, "", settings or {}) as pipe:
            info: RouterInfo = pipe.recv()
            url, nodes.router_inbox = info.url, info.inbox_endpoint
            nodes.admit(key_of(info.inbox_endpoint))
            until_ready(url)

            def probe(what: str = "cpu") -> float:
                """Returns the router's CPU time in seconds, its memory in bytes, or ("hold") the longest time for which its event
                loop was held since this was asked last."""
                pipe.send(what)
                return float(pipe.recv())

            yield url, probe


def until_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except urllib.error.HTTPError as error:  # its nodes have not reported yet
            if time.monotonic() > deadline:
                raise RuntimeError(f"the router is not ready: {error.read()!r}") from error
            time.sleep(0.01)


@contextmanager
def child(work: Any, *arguments: Any) -> Iterator[Connection]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=work, args=(theirs, *arguments), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.terminate()


def make_tokenizer(folder: str, special: Sequence[str] = ()) -> None:
    """Writes a tokenizer of bytes only. Encoding with it costs about what any byte-level model's tokenizer costs, within a factor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.save(str(Path(folder) / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    Path(folder, "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def serve_router(
    pipe: Connection,
    folder: str,
    nodes: list[NodeInfo],
    profile: str | None,
    door: str = "",
    settings: dict[str, Any] | None = None,
) -> None:
    if profile is None:
        uvloop.run(_serve_router(pipe, folder, nodes, door, settings or {}))
        return
    import cProfile

    profiler = cProfile.Profile()
    profiler.runcall(uvloop.run, _serve_router(pipe, folder, nodes, door, settings or {}))
    profiler.dump_stats(profile)


async def _serve_router(
    pipe: Connection, folder: str, nodes: list[NodeInfo], door: str, settings: dict[str, Any]
) -> None:
    config = RouterConfig(
        tokenizer_path=folder,
        model_name=MODEL,
        port=0,
        local_prefill=LocalPrefill.NEVER,
        **{"limits": Limits(inflight_per_node=4096), **settings},
    )
    host = RouterHost(msgspec.msgpack.encode(config))
    info = msgspec.msgpack.decode(await host.start(door), type=RouterInfo)
    await host.set_members(msgspec.msgpack.encode(nodes))
    pipe.send(info)
    beat: LoopBeat | None = None  # from the first question on, because beating is work
    while True:
        try:
            asked = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        if asked == "accepts":
            queue = await host.set_members(msgspec.msgpack.encode(nodes))
            pipe.send(msgspec.msgpack.decode(queue, type=RouterQueue).accepts)
            continue
        if asked == "hold":
            beat = beat or LoopBeat()
            pipe.send(beat.take())
            continue
        pipe.send(time.process_time() if asked == "cpu" else _resident_bytes())
    await host.stop()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def show(figures: dict[str, Any]) -> None:
    table = Table(title="The router, before engines that answer instantly", title_justify="left")
    for name in (
        "streams",
        "CPU µs/token",
        "of a relay",
        "added",
        "CPU µs/request",
        "events/token",
        "TTFT ms p50",
        "TTFT ms p99",
    ):
        table.add_column(name, justify="right")
    for row in figures["streams"]:
        table.add_row(
            str(row["streams"]),
            f"{row['cpu_us_per_token']:.0f}",
            f"{row['relay_us_per_token']:.0f}",
            f"{row['added_us_per_token']:.0f}",
            f"{row['cpu_us_per_request']:.0f}",
            f"{row['events_per_token']:.2f}",
            f"{row['ttft_ms_p50']:.1f}",
            f"{row['ttft_ms_p99']:.1f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"first token: {figures['ttft_ms']:.2f} ms, {figures['bare_ttft_ms']:.2f} ms without a router, "
        f"so {figures['added_ttft_ms']:.2f} ms added (floor {FLOOR_TTFT_MS:g} ms); "
        f"floor per token {FLOOR_TOKEN_US:g} µs; {figures['idle_ms_per_s']:.2f} ms of CPU per second when idle; "
        f"{figures['requests_per_s']:.0f} requests/s of one token, {figures['cpu_us_per_request']:.0f} µs of CPU each; with prompts "
        f"that are new {figures['requests_per_s_of_a_new_prompt']:.0f} and {figures['cpu_us_per_request_of_a_new_prompt']:.0f}, "
        f"with new chats {figures['cpu_us_per_request_of_a_new_chat']:.0f}, short ones {figures['cpu_us_per_request_of_a_short_new_chat']:.0f} µs"
    )


if __name__ == "__main__":
    sys.exit(main())
