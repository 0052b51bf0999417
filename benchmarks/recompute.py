"""Many long prompts at once in a running cluster: how much is computed twice, and for how long streams pause.

    python -m benchmarks.recompute [--url URL] [--prompts 180] [--tokens 900] [--output 16] [--rate R] [--json FILE]

All prompts are random and different, so no cache has them. The nodes' own counters are read before and after. A share of `prompt_tokens_twice`
above zero is lost work: prompts that the prefill node computed and the decode node computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib.engines import random_prompts
from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.servers import played, text_of
from benchmarks.lib.tables import table_of
from tandem.loadgen.api import RequestShape
from tandem.loadgen.load import LoadStream
from tandem.loadgen.metrics import count_failures, summarize
from tandem.loadgen.workload import single

TIMEOUT_S = 900.0
REFUSED = ("http_503", "http_429")


def counters(url: str) -> Counter[str]:
    """Returns the totals of the nodes' and the router's counters, as the router reports them."""
    families = text_string_to_metric_families(text_of(url, "/metrics"))
    found: Counter[str] = Counter()
    for sample in (one for family in families for one in family.samples):
        found[sample.name] += int(sample.value) if sample.value.is_integer() else sample.value  # type: ignore[assignment]
    return found


def load(options: argparse.Namespace) -> LoadStream:
    model = msgspec.json.decode(text_of(options.url, "/v1/models"))["data"][0]["id"]
    sessions = [
        single(tuple(1000 + token for token in prompt), options.tokens, options.output)
        for prompt in random_prompts(options.prompts, options.tokens, 39_000, options.seed)
    ]
    arrivals = [number / options.rate for number in range(options.prompts)] if options.rate else None
    shape = RequestShape(model, timeout_s=TIMEOUT_S)
    return asyncio.run(played(options.url, shape, sessions, arrivals=arrivals))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    before = counters(options.url)
    stream = load(options)
    time.sleep(1.5)  # the nodes report their last counters within this time
    gained = counters(options.url)
    gained.subtract(before)
    summary = summarize("prompts", stream.timelines, stream.duration_s)
    answered = sum(timeline.succeeded for timeline in stream.timelines)
    failures = {each.kind: each.count for each in count_failures(stream.timelines)}
    refused = sum(failures.get(kind, 0) for kind in REFUSED)
    wanted, computed = answered * options.tokens, gained["tandem_node_prompt_tokens_computed_total"]
    return {
        "prompts": options.prompts,
        "answered": answered,
        "refused": refused,
        "failed": options.prompts - answered - refused,
        "failures": failures,
        "seconds": stream.duration_s,
        "prompt_tokens": wanted,
        "prompt_tokens_computed": computed,
        "prompt_tokens_twice": max(0.0, computed / wanted - 1) if wanted else 0.0,
        "preemptions": gained["tandem_node_preemptions_total"],
        "failovers": gained["tandem_failovers_total"],
        "first_token_ms": summary.ttft_ms,
        "gap_ms": summary.itl_ms,
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=int, default=180)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.0, help="prompts per second; 0: all at once")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    found = measure(options)
    rows = [{"what": name.replace("_", " "), "figure": value} for name, value in found.items()]
    table = table_of(f"{options.prompts} prompts of {options.tokens} tokens", rows)
    return report(options, found, table, failed=found["failed"] > 0)


if __name__ == "__main__":
    run(main)
