"""KV over a link: what checksums add to a handover, and how long requests wait if the link's rate drops in the middle of their transfers.

    python -m benchmarks.links checksums [--rate 10gbit] [--tokens 4096] [--chunks 8] [--repeats 15] [--json FILE]
    python -m benchmarks.links slow [--rate 100mbit] [--to 1mbit] [--direction push|pull] [--tokens 512] [--requests 4] [--json FILE]

There is no model, but blocks are shaped like SmolLM2-135M's. With a rate (needs root) producer and consumers are on two machines made of network
namespaces, with UCX over TCP between them.

`checksums`: one producer, and one consumer for each of `off`, `sample` and `all`, which take turns. A prompt's chunks are all computed at once, so
that everything waits for the transfer. Without a rate, over shared memory. Times are from the end of the last chunk until the consumer's
scheduler knows, and the CPU is of both processes, including the kernel's part.

`slow`: the producer reports that it computes 10,000 tokens a second, so the consumer knows how long computing the rest would take. The link stays
slow, so a transfer that is not given up is waited for until `transfer.timeout_s`. Shows the seconds from the drop until each request's engine can
continue, which may mean computing what is missing, and how the transfers ended at the consumer.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.link import Link
from benchmarks.lib.processes import Remote
from benchmarks.lib.tables import at_most, table_of
from benchmarks.transfer_nodes import BLOCK_BYTES, BLOCK_SIZE, TransferNode
from tandem.kvtransfer.config import ChecksumPolicy, TransferConfig
from tandem.wire.nodes import PeerAddress

BAR_PERCENT = 5.0  # the most that `all` may add to the best handover over 10 Gbit
BAR_S = 3.0
_TOKENS_PER_S = 10_000.0
_BEFORE_THE_DROP_S = 0.4


class LinkedNode:
    def __init__(self, name: str, epoch: int, blocks: int, config: TransferConfig, namespace: str) -> None:
        self.remote = Remote(TransferNode, name, epoch, blocks, config, "cpu", namespace)
        self._name, self._epoch = name, epoch

    @functools.cached_property
    def address(self) -> PeerAddress:
        return PeerAddress(self._name, self._epoch, self.remote.call("endpoint"))

    def cpu_seconds(self) -> float:
        return float(self.remote.call("cpu_seconds"))


def checksums(options: argparse.Namespace) -> list[dict[str, Any]]:
    taken: dict[ChecksumPolicy, list[tuple[float, float]]] = {policy: [] for policy in ChecksumPolicy}
    with ExitStack() as stack:
        places = stack.enter_context(Link(options.rate)).names if options.rate else ("", "")
        blocks = 1 + options.tokens // BLOCK_SIZE
        producer = LinkedNode("p", 1, blocks, TransferConfig(), places[0])
        stack.callback(producer.remote.close)
        consumers = {}
        for number, policy in enumerate(ChecksumPolicy):
            config = TransferConfig(checksums=policy)
            consumers[policy] = LinkedNode(policy.value, 2 + number, blocks, config, places[1])
            stack.callback(consumers[policy].remote.close)
        for repeat in range(options.repeats + 1):
            for policy, consumer in consumers.items():
                one = _handover(producer, consumer, f"{policy.value}-{repeat}", options)
                taken[policy] += [one] if repeat else []  # the first transfer connects the two
    gigabytes = options.tokens // BLOCK_SIZE * BLOCK_BYTES / 1e9
    best = {policy: min(seconds for seconds, _ in of) for policy, of in taken.items()}
    return [
        {
            "checksums": policy.value,
            "best_ms": 1e3 * best[policy],
            "median_ms": 1e3 * statistics.median(seconds for seconds, _ in of),
            "over_off_percent": 100 * (best[policy] / best[ChecksumPolicy.OFF] - 1),
            "cpu_s_per_gb": statistics.median(cpu for _, cpu in of) / gigabytes,
        }
        for policy, of in taken.items()
    ]


def _handover(
    producer: LinkedNode, consumer: LinkedNode, name: str, options: argparse.Namespace
) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds of one transfer."""
    here, there = producer.address, consumer.address
    before = producer.cpu_seconds() + consumer.cpu_seconds()
    consumer.remote.begin("receive", [name], options.tokens, here)
    time.sleep(0.05)  # long enough for its registration to arrive
    producer.remote.begin("send", [name], options.tokens, there, options.chunks)
    arrived_at, computed_at = consumer.remote.result(), producer.remote.result()
    return arrived_at - computed_at, producer.cpu_seconds() + consumer.cpu_seconds() - before


def slow(options: argparse.Namespace) -> dict[str, Any]:
    blocks = 1 + options.requests * (options.tokens // BLOCK_SIZE)
    config = TransferConfig(direction=options.direction)
    with Link(options.rate) as link:
        producer = LinkedNode("p", 1, blocks, config, link.names[0])
        consumer = LinkedNode("c", 2, blocks, config, link.names[1])
        names = [f"r{number}" for number in range(options.requests)]
        producer.remote.call("learn_rate", _TOKENS_PER_S)
        here, there = producer.address, consumer.address
        consumer.remote.begin("receive", ["first"], BLOCK_SIZE, here)  # connects the two
        producer.remote.call("send", ["first"], BLOCK_SIZE, there)
        consumer.remote.result()
        consumer.remote.begin("receive_or_fail", names, options.tokens, here)
        time.sleep(0.3)  # long enough for the registrations to arrive
        producer.remote.begin("send", names, options.tokens, there)
        time.sleep(_BEFORE_THE_DROP_S)
        link.limit(options.to)
        dropped_at = time.monotonic()
        ended_at = consumer.remote.result()
        outcomes = consumer.remote.call("outcomes")
        for node in (producer, consumer):
            node.remote.kill()  # without waiting for the link
    waits = sorted(round(at - dropped_at, 2) for at in ended_at)
    asked = {"rate": options.rate, "to": options.to, "direction": options.direction}
    return {**asked, "s": waits, "outcomes": outcomes}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("checksums", "slow"))
    parser.add_argument("--rate", default="", help="such as 10gbit (slow: 100mbit)")
    parser.add_argument("--to", default="1mbit", help="the rate after the drop (%(default)s)")
    parser.add_argument("--direction", default="push", choices=["push", "pull"])
    parser.add_argument("--tokens", type=int, help="of each prompt (4096; slow: 512)")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--requests", type=int, default=4)
    options = parser.parse_args()
    options.tokens = options.tokens or (4096 if options.what == "checksums" else 512)
    if options.what == "checksums":
        rows = checksums(options)
        where = options.rate or "shared memory"
        table = table_of(f"{options.tokens} tokens in {options.chunks} chunks, {where}", rows)
        over = next(row["over_off_percent"] for row in rows if row["checksums"] == "all")
        floors = [at_most("all checksums over 10 Gbit, over off", over, BAR_PERCENT, "%")]
        return report(options, rows, table, floors=floors)
    options.rate = options.rate or "100mbit"
    found = slow(options)
    said = f"{options.direction}, {options.rate} to {options.to}: {found['s']} s, {found['outcomes']}"
    return report(options, found, said, floors=[at_most("the longest wait", found["s"][-1], BAR_S, "s")])


if __name__ == "__main__":
    run(main)
