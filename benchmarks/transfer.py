"""How fast KV travels through a connector, compared with the transport alone in the same run.

    python -m benchmarks.transfer [--quick] [--json FILE] [--direction push|pull] [--device cpu|cuda]
                                  [--connector NAME] [--checksums sample|all|off] [--ranks PxC]

Two processes are the two sides of a transfer. There is no model, but blocks are shaped like SmolLM2-135M's (30 layers, 3 KV heads of 64, 16
tokens, bf16: 360 KiB). `raw` is the NIXL agent that the connector uses, without protocol, in the same two processes: one operation for the same
blocks of the same memory. Times between processes are on CLOCK_MONOTONIC, which all processes of a machine share.

    throughput   GB/s from "the prompt is computed" to "the consumer's scheduler knows", for 16 to 16,384 tokens and 1 to
                 16 requests at once; the best of several, raw and the connector in turn. The largest batch is 5.6 GiB on either
                 side: what does not fit into free memory is left out and named
    handover     512 tokens computed in one forward pass: from its end to the consumer's scheduler
    overlap      2,048 tokens in chunks: the bytes that arrived before the last chunk was computed; a chunk goes layer by layer
    cpu          CPU seconds per GB, which other work on the machine does not change
    idle         CPU of a process that has a connector and a peer, and nothing to do
    step         the time of all connector calls in a step, with 1 and with 16 transfers running

`--ranks 2x4` measures only throughput, between nodes of two and of four ranks, each rank with its heads in memory of its own and in a process of its
own (`transfer_ranks`). `raw` is then one operation between each two ranks that have heads in common, all at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.processes import Remote
from benchmarks.lib.tables import Floor, at_least, at_most, table_of
from benchmarks.transfer_nodes import BLOCK_BYTES, TransferNode, TransferPair, blocks_of
from benchmarks.transfer_ranks import LLAMA_1B, RankPairs, parse_widths
from tandem.engine.model.memory import available_bytes
from tandem.kvtransfer.config import ChecksumPolicy, TransferConfig

Case = tuple[int, int]
"""Tokens of each request, and requests at once."""

QUICK_CASES = [(tokens, 1) for tokens in (16, 64, 256, 512, 1024, 4096)]
QUICK_CASES += [(512, 4), (512, 16), (1024, 4), (1024, 16)]
CASES = [*QUICK_CASES, (4096, 4), (4096, 16), (16_384, 1), (16_384, 4), (16_384, 16)]
CASES_OF_RANKS = [(512, 1), (2048, 1), (1024, 16), (4096, 4)]


def _that_fit(wanted: list[Case], device: str, block_bytes: int) -> tuple[list[Case], list[Case]]:
    """Returns the cases that fit, and those that do not. Two nodes leave two fifths of the free memory to other processes."""
    room = int(0.3 * available_bytes(torch.device(device))) // block_bytes
    fitting = [case for case in wanted if blocks_of(*case) <= room]
    return fitting, [case for case in wanted if case not in fitting]


def _config(options: argparse.Namespace) -> TransferConfig:
    return TransferConfig(
        connector=options.connector, direction=options.direction, checksums=ChecksumPolicy(options.checksums)
    )


class Benchmark(TransferPair):
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        wanted = QUICK_CASES if options.quick else CASES
        self.cases, self.left_out = _that_fit(wanted, options.device, BLOCK_BYTES)
        blocks = 1 + max(blocks_of(*case) for case in self.cases)
        config = _config(options)
        producer = Remote(TransferNode, "p", 1, blocks, config, options.device)
        consumer = Remote(TransferNode, "c", 2, blocks, config, options.device)
        super().__init__([producer], [consumer], options.direction, BLOCK_BYTES, 3 if options.quick else 7)

    def handover(self) -> dict[str, float]:
        samples, raw = [], []
        for _ in range(5 * self.repeats):
            raw.append(self.move_raw(blocks_of(512, 1)))
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
            "throughput": self.throughput(self.cases),
            "left_out": self.left_out,
            "overlap_2048": [self.overlap(chunk) for chunk in (256, 512, 2048)],
            "cpu": self.cpu(2048, 1),
            "step": self.step_cost(),
        }
        return results


def run_ranks(options: argparse.Namespace) -> dict[str, Any]:
    cases, left_out = _that_fit(CASES_OF_RANKS[: 3 if options.quick else None], "cpu", LLAMA_1B.block_bytes)
    blocks = 1 + max(blocks_of(*case) for case in cases)
    pairs = RankPairs(options.ranks, blocks, _config(options), 3 if options.quick else 15)
    try:
        rows, cpu = pairs.throughput(cases), pairs.cpu(*cases[-1])
    finally:
        pairs.close()
    return {
        "ranks": options.ranks,
        "direction": options.direction,
        "checksums": options.checksums,
        "cores": len(os.sched_getaffinity(0)),
        "block_bytes": LLAMA_1B.block_bytes,
        "throughput": rows,
        "cpu": cpu,
        "left_out": left_out,
    }


def floors_of(results: dict[str, Any]) -> list[Floor]:
    floors = [at_least("largest batch, of raw NIXL", results["throughput"][-1]["of_raw"], 0.85, "×")]
    if "handover_512" in results:
        handover = results["handover_512"]
        floors += [
            at_most("handover of 512 tokens", handover["ms_p50"], 10, "ms"),
            at_most("the same, over raw NIXL", handover["ms_p50"] / handover["raw_ms_p50"], 2, "×"),
            at_least("moved while the prompt was computed", results["overlap_2048"][0]["share"], 0.8),
        ]
    return floors


def lines_of(results: dict[str, Any]) -> Iterator[str]:
    for tokens, requests in results["left_out"]:
        yield f"left out: {requests} × {tokens} tokens do not fit into the memory that is free"
    for name in ("handover_512", "overlap_2048", "cpu", "idle", "step"):
        for row in (found,) if isinstance(found := results.get(name, []), dict) else found:
            yield f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, smaller prompts")
    parser.add_argument("--connector", default="nixl")
    parser.add_argument("--direction", default="push", choices=["push", "pull"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checksums", default="sample", choices=[policy.value for policy in ChecksumPolicy])
    parser.add_argument(
        "--ranks",
        type=parse_widths,
        metavar="PxC",
        help="ranks of the producer and of the consumer, which keep their heads apart, such as 2x4",
    )
    options = parser.parse_args(arguments)
    if options.ranks is not None and (options.connector, options.device) != ("nixl", "cpu"):
        parser.error("--ranks measures the nixl connector on the CPU: leave --connector and --device out")
    if options.ranks is not None:
        results = run_ranks(options)
        widths = " to ".join(map(str, options.ranks))
        title = f"{widths} ranks that keep their heads apart, {options.direction}, {results['cores']} cores"
    else:
        benchmark = Benchmark(options)
        try:
            results = benchmark.run()
        finally:
            benchmark.close()
        title = f"{options.connector}, {options.direction}, {options.device}"
    table = table_of(title, results["throughput"], left=0)
    return report(options, results, table, *lines_of(results), floors=floors_of(results))


if __name__ == "__main__":
    run(main)
