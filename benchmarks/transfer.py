"""How fast KV travels through a connector, beside the transport alone in the same run.

    python benchmarks/transfer.py [--connector nixl] [--direction push] [--json FILE]
                                  [--raw-script PATH] [--device cuda] [--quick]

Two processes, each one half of a transfer, no model: blocks shaped like SmolLM2-135M's (30 layers, 3 KV heads of
64, 16 tokens, bf16: 360 KiB). Times across processes are CLOCK_MONOTONIC, which all processes of a machine share.

    throughput   GB/s from "the prompt is computed" to "the consumer's scheduler knows", for 16 to 16,384 tokens and
                 1 to 16 requests at once; `raw` is the transport alone, one operation of the same blocks, polled
    handover     512 tokens computed in one forward pass: from its end to the consumer's scheduler
    overlap      2,048 tokens in four chunks: bytes that had arrived before the last chunk was computed
    idle         CPU of a process that has a connector, a peer, and nothing to do
    step         what a transfer under way costs the step loop: the connector's calls in a step
    cpu          CPU seconds of both processes per GB moved
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvtransfer.base import ConnectorContext, ConnectorOutput, KVCacheMemory, TransferConfig
from kvtransfer.registry import find_connector
from wire.nodes import PeerAddress
from wire.requests import KVTransferParams, TransferRole

LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 30, 3, 16, 64
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2


@dataclasses.dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    transfer: KVTransferParams | None
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.all_token_ids[self.num_prompt_tokens :]


@dataclasses.dataclass
class Step:
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[str] = dataclasses.field(default_factory=set)

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        return ()


class Node:
    """A step loop without a model, and the two halves of a connector."""

    def __init__(
        self, node_id: str, epoch: int, num_blocks: int, config: TransferConfig, device: str
    ) -> None:
        self.cache = torch.zeros(
            num_blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device
        )
        self.cache.fill_(1.0)  # touched: a page that was never written is mapped during the first transfer
        self.wake = threading.Event()
        self.planner, self.mover = find_connector(config.connector)(
            ConnectorContext(node_id, epoch, "127.0.0.1", BLOCK_SIZE, config, self.wake.set)
        )
        self.mover.register_kv_caches(KVCacheMemory(self.cache, "benchmark", LAYERS, 1))
        self.step_seconds: list[float] = []

    def endpoint(self) -> str:
        return self.mover.peer_endpoint

    def step(
        self, scheduled: dict[str, int] | None = None, compute_s: float = 0.0
    ) -> tuple[ConnectorOutput, float]:
        began = time.perf_counter()
        metadata = self.planner.build_connector_meta(Step(scheduled or {}))
        self.mover.bind_connector_metadata(metadata)
        self.mover.start_load_kv()
        spent = time.perf_counter() - began
        if compute_s:
            _compute(compute_s)
        computed_at = time.monotonic()
        began = time.perf_counter()
        self.mover.wait_for_save()
        output = self.mover.get_finished(set())
        self.planner.update_connector_output(output)
        self.step_seconds.append(spent + time.perf_counter() - began)
        return output, computed_at

    def _admit(self, names: list[str], tokens: int, role: TransferRole, peer: PeerAddress) -> list[Request]:
        requests = []
        blocks = -(-tokens // BLOCK_SIZE)
        for index, name in enumerate(names):
            prompt = list(range(tokens))
            request = Request(name, prompt, tokens, KVTransferParams(f"t-{name}", role, peer))
            self.planner.on_new_request(request)
            external, _ = self.planner.get_num_new_matched_tokens(request, 0)
            first = 1 + index * blocks
            self.planner.update_state_after_alloc(
                request, [list(range(first, first + blocks))], external or 0
            )
            requests.append(request)
        return requests

    def receive(self, names: list[str], tokens: int, peer: PeerAddress) -> float:
        """Returns when the scheduler knew of the last of them."""
        self._admit(names, tokens, TransferRole.CONSUME, peer)
        missing = set(names)
        while missing:
            self.wake.clear()
            output, _ = self.step()
            if output.failed_recving:
                raise RuntimeError(f"a transfer failed: {output.failed_recving}")
            missing -= output.finished_recving.keys()
            if missing and not self.wake.wait(60):
                raise TimeoutError(f"{len(missing)} transfers did not arrive")
        return time.monotonic()

    def send(
        self, names: list[str], tokens: int, peer: PeerAddress, chunks: int = 1, compute_s: float = 0.0
    ) -> float:
        """Returns when the last forward pass had ended."""
        requests = self._admit(names, tokens, TransferRole.PRODUCE, peer)
        for _ in range(chunks):
            _, computed_at = self.step(dict.fromkeys(names, tokens // chunks), compute_s)
        for index, request in enumerate(requests):
            request.all_token_ids.append(7)
            blocks = -(-tokens // BLOCK_SIZE)
            first = 1 + index * blocks
            assert self.planner.request_finished(request, [list(range(first, first + blocks))])
        missing = set(names)
        while missing:
            self.wake.clear()
            output, _ = self.step()
            missing -= output.finished_sending
            if missing and not self.wake.wait(60):
                raise TimeoutError(f"{len(missing)} transfers were not confirmed")
        return computed_at

    def idle_cpu_percent(self, seconds: float) -> float:
        began = time.process_time()
        time.sleep(seconds)
        return 100 * (time.process_time() - began) / seconds

    def cpu_seconds(self) -> float:
        return time.process_time()

    def take_step_seconds(self) -> list[float]:
        taken, self.step_seconds = self.step_seconds, []
        return taken

    def overlapped(self) -> tuple[int, int]:
        stats = self.mover.stats()
        return stats.bytes_overlapped, stats.bytes_sent

    def close(self) -> None:
        self.mover.shutdown()


class RawNode:
    """The transport alone: the NIXL agent that the connector uses, without protocol, threads or side channel."""

    def __init__(self, node_id: str, num_blocks: int, device: str) -> None:
        from kvtransfer.nixl.agent import NixlAgent
        from kvtransfer.nixl.options import NixlOptions
        from kvtransfer.nixl.transport import NixlTransport

        self.cache = torch.zeros(
            num_blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device
        )
        self.cache.fill_(1.0)
        self.transport = NixlTransport(NixlAgent(node_id, NixlOptions()))
        self.memory = self.transport.register(KVCacheMemory(self.cache, "benchmark", LAYERS, 1))

    def describe(self) -> Any:
        return self.memory

    def connect(self, memory: Any) -> None:
        self.remote = self.transport.connect(memory)

    def move(self, direction: str, blocks: int) -> float:
        from kvtransfer.protocol.transport import Operation

        ids = list(range(1, blocks + 1))
        began = time.perf_counter()
        operation = Operation.WRITE if direction == "push" else Operation.READ
        handle = self.transport.post(operation, self.remote, ids, ids)
        while not self.transport.is_done(handle):
            pass
        return time.perf_counter() - began

    def close(self) -> None:
        self.transport.close()


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    matrix = torch.ones(256, 256)
    while time.perf_counter() < until:
        torch.mm(matrix, matrix)


def _serve(calls: Connection, kind: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    node: Any = {"node": Node, "raw": RawNode}[kind](*args)
    while True:
        name, arguments = calls.recv()
        calls.send(getattr(node, name)(*arguments))
        if name == "close":
            return


class Remote:
    def __init__(self, kind: str, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, args), daemon=True)
        self._process.start()

    def begin(self, name: str, *args: Any) -> None:
        self._calls.send((name, args))

    def result(self) -> Any:
        if not self._calls.poll(180):
            raise TimeoutError("a benchmark process did not answer")
        return self._calls.recv()

    def call(self, name: str, *args: Any) -> Any:
        self.begin(name, *args)
        return self.result()

    def close(self) -> None:
        self.call("close")
        self._process.join(10)


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.repeats = 3 if options.quick else 7
        self.largest = 4096 if options.quick else 16_384
        blocks = 1 + 16 * 64 if options.quick else 1 + max(self.largest // BLOCK_SIZE, 16 * 64)
        config = TransferConfig(connector=options.connector, direction=options.direction)
        self.producer = Remote("node", "p", 1, blocks, config, options.device)
        self.consumer = Remote("node", "c", 2, blocks, config, options.device)
        self.raw = [Remote("raw", name, blocks, options.device) for name in ("raw-p", "raw-c")]
        self.addresses = {
            "p": PeerAddress("p", 1, self.producer.call("endpoint")),
            "c": PeerAddress("c", 2, self.consumer.call("endpoint")),
        }
        # The consumer reads and the producer writes: whoever moves connects to the other.
        self.mover, other = self.raw if options.direction == "push" else self.raw[::-1]
        self.mover.call("connect", other.call("describe"))
        self._names = (f"r{number}" for number in range(1_000_000))
        self.transfer(16, 1)
        self.mover.call("move", options.direction, 1)

    def transfer(self, tokens: int, at_once: int, chunks: int = 1, compute_s: float = 0.0) -> float:
        names = [next(self._names) for _ in range(at_once)]
        self.consumer.begin("receive", names, tokens, self.addresses["p"])
        time.sleep(0.02)  # the registrations are there, as they are when a prompt takes its time
        self.producer.begin("send", names, tokens, self.addresses["c"], chunks, compute_s)
        arrived_at = self.consumer.result()
        computed_at = self.producer.result()
        return float(arrived_at - computed_at)

    def throughput(self) -> list[dict[str, Any]]:
        cases = [(tokens, 1) for tokens in (16, 64, 256, 512, 1024, 4096, 16_384) if tokens <= self.largest]
        cases += [(512, 4), (512, 16), (1024, 16)]
        rows = []
        for tokens, at_once in cases:
            blocks = tokens // BLOCK_SIZE * at_once
            # Alternating, so that what else happens on the machine hits both.
            pairs = [
                (self.mover.call("move", self.options.direction, blocks), self.transfer(tokens, at_once))
                for _ in range(self.repeats)
            ]
            raw_s, ours_s = (min(seconds) for seconds in zip(*pairs, strict=True))
            size = blocks * BLOCK_BYTES
            rows.append(
                {
                    "tokens": tokens,
                    "requests": at_once,
                    "mb": round(size / 1e6, 1),
                    "raw_ms": round(raw_s * 1e3, 2),
                    "ms": round(ours_s * 1e3, 2),
                    "raw_gb_s": round(size / raw_s / 1e9, 2),
                    "gb_s": round(size / ours_s / 1e9, 2),
                    "of_raw": round(raw_s / ours_s, 2),
                }
            )
        return rows

    def handover(self) -> dict[str, float]:
        samples, raw = [], []
        for _ in range(5 * self.repeats):
            raw.append(self.mover.call("move", self.options.direction, 512 // BLOCK_SIZE))
            samples.append(self.transfer(512, 1))
        return {
            "raw_ms_p50": round(1e3 * statistics.median(raw), 2),
            "ms_p50": round(1e3 * statistics.median(samples), 2),
            "ms_min": round(1e3 * min(samples), 2),
            "ms_max": round(1e3 * max(samples), 2),
        }

    def overlap(self) -> dict[str, float]:
        before = self.producer.call("overlapped")
        latency = min(self.transfer(2048, 1, chunks=4, compute_s=0.15) for _ in range(self.repeats))
        after = self.producer.call("overlapped")
        moved = after[1] - before[1]
        return {
            "share": round((after[0] - before[0]) / moved, 3) if moved else 0.0,
            "after_last_forward_ms": round(1e3 * latency, 2),
        }

    def cpu(self) -> dict[str, float]:
        before = [node.call("cpu_seconds") for node in (self.producer, self.consumer)]
        for _ in range(self.repeats):
            self.transfer(2048, 1)
        after = [node.call("cpu_seconds") for node in (self.producer, self.consumer)]
        gigabytes = self.repeats * 2048 // BLOCK_SIZE * BLOCK_BYTES / 1e9
        names = ("producer_s_per_gb", "consumer_s_per_gb")
        return {name: round((b - a) / gigabytes, 3) for name, a, b in zip(names, before, after, strict=True)}

    def step_cost(self) -> dict[str, float]:
        for node in (self.producer, self.consumer):
            node.call("take_step_seconds")
        for _ in range(self.repeats):
            self.transfer(512, 16)
        names = ("producer_us_p50", "consumer_us_p50")
        return {
            name: round(1e6 * statistics.median(node.call("take_step_seconds")), 1)
            for name, node in zip(names, (self.producer, self.consumer), strict=True)
        }

    def idle(self) -> dict[str, float]:
        seconds = 2.0 if self.options.quick else 5.0
        for node in (self.producer, self.consumer):
            node.begin("idle_cpu_percent", seconds)
        return {
            "producer_percent": round(self.producer.result(), 2),
            "consumer_percent": round(self.consumer.result(), 2),
        }

    def run(self) -> dict[str, Any]:
        results: dict[str, Any] = {
            "connector": self.options.connector,
            "direction": self.options.direction,
            "device": self.options.device,
            "block_bytes": BLOCK_BYTES,
            "idle": self.idle(),
            "handover_512": self.handover(),
            "throughput": self.throughput(),
            "overlap_2048": self.overlap(),
            "cpu": self.cpu(),
            "step": self.step_cost(),
        }
        if self.options.raw_script:
            command = [sys.executable, self.options.raw_script, str(BLOCK_BYTES)]
            finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            results["raw_script"] = finished.stdout.splitlines()
        return results

    def close(self) -> None:
        for node in (self.producer, self.consumer, *self.raw):
            node.close()


def print_table(results: dict[str, Any]) -> None:
    print(f"\n{results['connector']}, {results['direction']}, {results['device']}")
    columns = list(results["throughput"][0])
    print("  ".join(f"{column:>9}" for column in columns))
    for row in results["throughput"]:
        print("  ".join(f"{row[column]:>9}" for column in columns))
    for name in ("handover_512", "overlap_2048", "idle", "cpu", "step"):
        print(f"{name:>13}: " + ", ".join(f"{key} {value}" for key, value in results[name].items()))
    for line in results.get("raw_script", []):
        print(f"   raw script: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connector", default="nixl")
    parser.add_argument("--direction", default="push", choices=["push", "pull"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--raw-script", help="another raw measurement to run beside: it gets the block size")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    benchmark = Benchmark(options)
    try:
        results = benchmark.run()
    finally:
        benchmark.close()
    print(json.dumps(results))
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
