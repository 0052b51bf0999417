"""How long requests wait for their KV if the link's rate drops in the middle of their transfers.

    python -m benchmarks.slow_link [--rate 100mbit] [--to 1mbit] [--direction push|pull] [--tokens N] [--requests N] [--json FILE]

Needs root: producer and consumer are on two machines made of network namespaces, with UCX over TCP between them; there is no model. The producer
reports that it computes 10,000 tokens a second, so the consumer knows how long computing the rest would take. The link stays slow, so a transfer
that is not given up is waited for until `transfer.timeout_s`.

    s          from the drop until the request's engine can continue, which may mean computing what is missing
    outcomes   how the transfers ended at the consumer
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.transfer_link import Link
from benchmarks.transfer_nodes import BLOCK_SIZE, Remote
from tandem.kvtransfer.config import TransferConfig
from tandem.wire.nodes import PeerAddress

BAR_S = 3.0
_TOKENS_PER_S = 10_000.0
_BEFORE_THE_DROP_S = 0.4


def measure(options: argparse.Namespace) -> dict[str, Any]:
    blocks = 1 + options.requests * (options.tokens // BLOCK_SIZE)
    config = TransferConfig(direction=options.direction)
    with Link(options.rate) as link:
        producer = Remote("p", 1, blocks, config, "cpu", link.names[0])
        consumer = Remote("c", 2, blocks, config, "cpu", link.names[1])
        here = PeerAddress("p", 1, producer.call("endpoint"))
        there = PeerAddress("c", 2, consumer.call("endpoint"))
        producer.call("learn_rate", _TOKENS_PER_S)
        consumer.begin("receive", ["first"], BLOCK_SIZE, here)  # connects the two
        producer.call("send", ["first"], BLOCK_SIZE, there)
        consumer.result()
        names = [f"r{number}" for number in range(options.requests)]
        consumer.begin("receive_or_fail", names, options.tokens, here)
        time.sleep(0.3)  # long enough for the registrations to arrive
        producer.begin("send", names, options.tokens, there)
        time.sleep(_BEFORE_THE_DROP_S)
        link.limit(options.to)
        dropped_at = time.monotonic()
        ended_at = consumer.result()
        outcomes = consumer.call("outcomes")
        for node in (producer, consumer):
            node.kill()
    waits = sorted(round(at - dropped_at, 2) for at in ended_at)
    return {
        "rate": options.rate,
        "to": options.to,
        "direction": options.direction,
        "s": waits,
        "outcomes": outcomes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.slow_link", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--to", default="1mbit")
    parser.add_argument("--direction", default="push", choices=["push", "pull"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    results = measure(options)
    console = Console(width=120)
    console.print(
        f"{options.direction}, {options.rate} to {options.to}: {results['s']} s, {results['outcomes']}"
    )
    console.print(f"the longest: {results['s'][-1]:.2f} s (bar {BAR_S:g} s)")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
