"""What checksums add to a handover: the same prompts under each policy in turn, over shared memory or over a link.

    python -m benchmarks.checksums [--link 10gbit] [--tokens N] [--chunks N] [--repeats N] [--json FILE]

One producer, and one consumer for each of `off`, `sample` and `all`; no model, but blocks shaped like SmolLM2-135M's. A prompt's chunks are all
computed at once, so that everything waits for the transfer. With `--link` (needs root) producer and consumers are on two machines made of
network namespaces, with UCX over TCP between them.

    ms       from the end of the last chunk until the consumer's scheduler knows: the best, and the median
    cpu      CPU seconds of both processes per GB, including the kernel's part
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.transfer_link import Link
from benchmarks.transfer_nodes import BLOCK_BYTES, BLOCK_SIZE, Remote
from tandem.kvtransfer.config import ChecksumPolicy, TransferConfig
from tandem.wire.nodes import PeerAddress

BAR_PERCENT = 5.0  # the most that `all` may add to the best handover over 10 Gbit


class Benchmark:
    def __init__(self, tokens: int, chunks: int, places: tuple[str, ...]) -> None:
        self._tokens, self._chunks = tokens, chunks
        blocks = 1 + tokens // BLOCK_SIZE
        here, there = places or ("", "")
        self._producer = Remote("p", 1, blocks, TransferConfig(), "cpu", here)
        self._consumers = {
            policy: Remote(policy.value, 2 + number, blocks, TransferConfig(checksums=policy), "cpu", there)
            for number, policy in enumerate(ChecksumPolicy)
        }
        self._from = PeerAddress("p", 1, self._producer.call("endpoint"))
        self._to = {
            policy: PeerAddress(policy.value, 2 + number, consumer.call("endpoint"))
            for number, (policy, consumer) in enumerate(self._consumers.items())
        }
        self._count = 0

    def transfer(self, policy: ChecksumPolicy) -> tuple[float, float]:
        """Returns the seconds and the CPU seconds of one transfer."""
        consumer = self._consumers[policy]
        self._count += 1
        names = [f"r{self._count}"]
        before = self._producer.call("cpu_seconds") + consumer.call("cpu_seconds")
        consumer.begin("receive", names, self._tokens, self._from)
        time.sleep(0.05)  # long enough for its registration to arrive
        self._producer.begin("send", names, self._tokens, self._to[policy], self._chunks)
        arrived_at, computed_at = consumer.result(), self._producer.result()
        spent = self._producer.call("cpu_seconds") + consumer.call("cpu_seconds") - before
        return arrived_at - computed_at, spent

    def run(self, repeats: int) -> dict[str, dict[str, float]]:
        seconds: dict[ChecksumPolicy, list[tuple[float, float]]] = {policy: [] for policy in ChecksumPolicy}
        for repeat in range(repeats + 1):
            for policy, taken in seconds.items():
                one = self.transfer(policy)
                if repeat:  # the first transfer connects the two
                    taken.append(one)
        gigabytes = self._tokens // BLOCK_SIZE * BLOCK_BYTES / 1e9
        best_off = min(taken for taken, _ in seconds[ChecksumPolicy.OFF])
        return {
            policy.value: {
                "best_ms": round(1e3 * min(taken for taken, _ in of), 2),
                "median_ms": round(1e3 * statistics.median(taken for taken, _ in of), 2),
                "over_off_percent": round(100 * (min(taken for taken, _ in of) / best_off - 1), 1),
                "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in of) / gigabytes, 3),
            }
            for policy, of in seconds.items()
        }

    def close(self) -> None:
        for node in (self._producer, *self._consumers.values()):
            node.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.checksums", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", default="", metavar="RATE", help="such as 10gbit; without it shared memory")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with ExitStack() as stack:
        places = stack.enter_context(Link(options.link)).names if options.link else ()
        benchmark = Benchmark(options.tokens, options.chunks, places)
        stack.callback(benchmark.close)
        figures = benchmark.run(options.repeats)
    results: dict[str, Any] = {"link": options.link, "tokens": options.tokens, "chunks": options.chunks}
    results["checksums"] = figures
    table = Table(
        title=f"{options.tokens} tokens in {options.chunks} chunks, {options.link or 'shared memory'}"
    )
    for column in ("checksums", *figures["off"]):
        table.add_column(column, justify="right")
    for name, row in figures.items():
        table.add_row(name, *(str(value) for value in row.values()))
    console = Console(width=120)
    console.print(table)
    console.print(f"all: {figures['all']['over_off_percent']}% over off (bar {BAR_PERCENT:g}% over 10 Gbit)")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
