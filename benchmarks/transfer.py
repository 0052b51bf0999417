"""How fast KV travels through a connector, beside the transport alone in the same run.

    python -m benchmarks.transfer [--quick] [--json FILE] [--direction push|pull] [--device cpu|cuda]
                                  [--connector NAME] [--checksums sample|all|off] [--raw-script PATH]

Two processes, each one side of a transfer, no model: blocks shaped like SmolLM2-135M's (30 layers, 3 KV heads of 64, 16
tokens, bf16: 360 KiB). `raw` is the NIXL agent that the connector uses, without protocol, in the same two processes: one
operation for the same blocks of the same memory. Times between processes are CLOCK_MONOTONIC, which all processes of a
machine share.

    throughput   GB/s from "the prompt is computed" to "the consumer's scheduler knows", for 16 to 16,384 tokens and 1 to
                 16 requests at once; best of several, raw and ours in turn. The largest batch is 5.6 GiB on either side:
                 what does not fit into the memory that is free is left out, and said
    handover     512 tokens computed in one forward pass: from its end to the consumer's scheduler
    overlap      2,048 tokens in chunks: bytes that had arrived before the last chunk was computed; a chunk goes layer by layer
    cpu          CPU seconds per GB, which mean the same on a machine that has other things to do
    idle         CPU of a process that has a connector, a peer, and nothing to do
    step         what the connector's calls take in a step, all in all, with 1 and with 16 transfers under way

`--raw-script` runs another raw measurement beside; it gets the block size, and what it prints is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.transfer_nodes import BLOCK_BYTES, BLOCK_SIZE, Remote
from tandem.engine.model.memory import available_bytes
from tandem.kvtransfer.config import ChecksumPolicy, TransferConfig
from tandem.wire.nodes import PeerAddress

FLOOR_OF_RAW = 0.85  # for the largest batches
FLOOR_HANDOVER_MS = 10.0
FLOOR_HANDOVER_TO_RAW = 2.0
FLOOR_OVERLAP = 0.8

# (tokens of each request, requests at once)
QUICK_CASES = [(tokens, 1) for tokens in (16, 64, 256, 512, 1024, 4096)]
QUICK_CASES += [(512, 4), (512, 16), (1024, 4), (1024, 16)]
CASES = [*QUICK_CASES, (4096, 4), (4096, 16), (16_384, 1), (16_384, 4), (16_384, 16)]


def _blocks(tokens: int, requests: int) -> int:
    return tokens // BLOCK_SIZE * requests


def _blocks_of_one_node(device: str) -> int:
    """Two nodes leave two fifths of what is free to other processes."""
    return int(0.3 * available_bytes(torch.device(device))) // BLOCK_BYTES


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.repeats = 3 if options.quick else 7
        wanted = QUICK_CASES if options.quick else CASES
        room = _blocks_of_one_node(options.device)
        self.cases = [case for case in wanted if _blocks(*case) <= room]
        self.left_out = [case for case in wanted if _blocks(*case) > room]
        blocks = 1 + max(_blocks(*case) for case in self.cases)
        config = TransferConfig(
            connector=options.connector,
            direction=options.direction,
            checksums=ChecksumPolicy(options.checksums),
        )
        self.producer = Remote("p", 1, blocks, config, options.device)
        self.consumer = Remote("c", 2, blocks, config, options.device)
        self.addresses = {
            "p": PeerAddress("p", 1, self.producer.call("endpoint")),
            "c": PeerAddress("c", 2, self.consumer.call("endpoint")),
        }
        # The consumer reads and the producer writes.
        self.mover, self.moved = self.producer, self.consumer
        if options.direction == "pull":
            self.mover, self.moved = self.moved, self.mover
        self._names = (f"r{number}" for number in range(1_000_000))
        self.transfer(16, 1)

    def open_raw(self) -> None:
        self.mover.call("open_raw")
        self.mover.call("connect_raw", self.moved.call("open_raw"))
        self.move_raw(1)

    def move_raw(self, blocks: int) -> float:
        return float(self.mover.call("move_raw", self.options.direction, blocks))

    def transfer(self, tokens: int, at_once: int, chunks: int = 1, compute_s: float = 0.0) -> float:
        names = [next(self._names) for _ in range(at_once)]
        self.consumer.begin("receive", names, tokens, self.addresses["p"])
        time.sleep(0.02)  # the registrations are there, as they are when a prompt takes its time
        self.producer.begin("send", names, tokens, self.addresses["c"], chunks, compute_s)
        arrived_at = self.consumer.result()
        computed_at = self.producer.result()
        return float(arrived_at - computed_at)

    def throughput(self) -> list[dict[str, Any]]:
        rows = []
        for tokens, at_once in self.cases:
            blocks = _blocks(tokens, at_once)
            # Alternating, so that what else happens on the machine hits both.
            pairs = [(self.move_raw(blocks), self.transfer(tokens, at_once)) for _ in range(self.repeats)]
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
            raw.append(self.move_raw(_blocks(512, 1)))
            samples.append(self.transfer(512, 1))
        return {
            "raw_ms_p50": round(1e3 * statistics.median(raw), 2),
            "ms_p50": round(1e3 * statistics.median(samples), 2),
            "ms_min": round(1e3 * min(samples), 2),
            "ms_max": round(1e3 * max(samples), 2),
        }

    def overlap(self, chunk: int) -> dict[str, float]:
        """The forward pass keeps a core busy for as long as SmolLM2-135M's would."""
        chunks, compute_s = 2048 // chunk, 0.3 * chunk / 512
        before = self.producer.call("overlapped")
        latency = min(self.transfer(2048, 1, chunks, compute_s) for _ in range(min(3, self.repeats)))
        after = self.producer.call("overlapped")
        return {
            "chunk": chunk,
            "share": round((after[0] - before[0]) / (after[1] - before[1]), 3),
            "after_last_forward_ms": round(1e3 * latency, 2),
        }

    def cpu(self) -> dict[str, float]:
        spent = dict.fromkeys(("producer", "consumer", "raw"), 0.0)
        for _ in range(self.repeats):
            before = [node.call("cpu_seconds") for node in (self.producer, self.consumer, self.mover)]
            self.transfer(2048, 1)
            between = [node.call("cpu_seconds") for node in (self.producer, self.consumer, self.mover)]
            self.move_raw(_blocks(2048, 1))
            spent["producer"] += between[0] - before[0]
            spent["consumer"] += between[1] - before[1]
            spent["raw"] += self.mover.call("cpu_seconds") - between[2]
        gigabytes = self.repeats * _blocks(2048, 1) * BLOCK_BYTES / 1e9
        return {f"{name}_s_per_gb": round(seconds / gigabytes, 3) for name, seconds in spent.items()}

    def step_cost(self) -> dict[str, float]:
        cost = {}
        for at_once in (1, 16):
            for node in (self.producer, self.consumer):
                node.call("take_step_seconds")
            for _ in range(self.repeats):
                self.transfer(512, at_once)
            for name, node in (("producer", self.producer), ("consumer", self.consumer)):
                taken = statistics.median(node.call("take_step_seconds"))
                cost[f"{name}_{at_once}_us_p50"] = round(1e6 * taken, 1)
        return cost

    def idle(self) -> dict[str, float]:
        seconds = 2.0 if self.options.quick else 5.0
        for node in (self.producer, self.consumer):
            node.begin("idle_cpu_percent", seconds)
        return {
            "producer_percent": round(self.producer.result(), 2),
            "consumer_percent": round(self.consumer.result(), 2),
        }

    def run(self) -> dict[str, Any]:
        idle = self.idle()
        self.open_raw()
        results: dict[str, Any] = {
            "connector": self.options.connector,
            "direction": self.options.direction,
            "device": self.options.device,
            "checksums": self.options.checksums,
            "block_bytes": BLOCK_BYTES,
            "idle": idle,
            "handover_512": self.handover(),
            "throughput": self.throughput(),
            "left_out": self.left_out,
            "overlap_2048": [self.overlap(chunk) for chunk in (256, 512, 2048)],
            "cpu": self.cpu(),
            "step": self.step_cost(),
        }
        if self.options.raw_script:
            command = [sys.executable, self.options.raw_script, str(BLOCK_BYTES)]
            finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            results["raw_script"] = finished.stdout.splitlines()
        return results

    def close(self) -> None:
        for node in (self.producer, self.consumer):
            node.close()


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table(title=f"{results['connector']}, {results['direction']}, {results['device']}")
    for column in results["throughput"][0]:
        table.add_column(column, justify="right")
    for row in results["throughput"]:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    for tokens, requests in results["left_out"]:
        console.print(f"left out: {requests} × {tokens} tokens do not fit into the memory that is free")
    for name in ("handover_512", "cpu", "idle", "step"):
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in results[name].items()))
    for row in results["overlap_2048"]:
        console.print("overlap_2048: " + ", ".join(f"{key} {value}" for key, value in row.items()))
    largest, handover = results["throughput"][-1], results["handover_512"]
    ratio = handover["ms_p50"] / handover["raw_ms_p50"]
    console.print(f"largest batch: {largest['of_raw']:.2f} of raw (floor {FLOOR_OF_RAW})")
    console.print(
        f"handover: {handover['ms_p50']} ms (floor {FLOOR_HANDOVER_MS:g}), "
        f"{ratio:.1f} times raw (floor {FLOOR_HANDOVER_TO_RAW:g})"
    )
    console.print(f"overlap: {results['overlap_2048'][0]['share']:.2f} (floor {FLOOR_OVERLAP})")
    for line in results.get("raw_script", []):
        console.print(f"raw script: {line}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.transfer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, smaller prompts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--connector", default="nixl")
    parser.add_argument("--direction", default="push", choices=["push", "pull"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checksums", default="sample", choices=[policy.value for policy in ChecksumPolicy])
    parser.add_argument("--raw-script", help="another raw measurement to run beside")
    options = parser.parse_args()
    benchmark = Benchmark(options)
    try:
        results = benchmark.run()
    finally:
        benchmark.close()
    show(Console(width=120), results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
