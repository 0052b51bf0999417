"""Many long prompts at once in a running cluster: how much is computed twice, and for how long streams pause.

    python -m benchmarks.recompute [--url URL] [--prompts 180] [--tokens 900] [--output 16] [--rate R] [--json FILE]

All prompts are random and different, so no cache has them. The nodes' own counters are read before and after. A share of `prompt_tokens_twice`
above zero is lost work: prompts that the prefill node computed and the decode node computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec

TIMEOUT_S = 900.0


class RecomputeOutcome(msgspec.Struct):
    prompts: int
    answered: int
    refused: int  # with 503 or 429
    failed: int
    seconds: float
    prompt_tokens: int  # prompt tokens of the answered requests, together
    prompt_tokens_computed: int  # on all nodes
    prompt_tokens_twice: float  # as a share of the prompts' tokens
    preemptions: int
    transfers: dict[str, int]  # by node role and outcome
    failovers: int
    first_token_p50_s: float
    first_token_p99_s: float
    gap_p99_s: float
    longest_gap_s: float
    errors: dict[str, int]


class Counters:
    """The nodes' counters, as the router reports them."""

    def __init__(self, text: str) -> None:
        self.values: Counter[str] = Counter()
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                self.values[name] += float(value)  # type: ignore[assignment]

    def total(self, metric: str) -> float:
        return sum(value for name, value in self.values.items() if name.split("{")[0] == metric)

    def by(self, metric: str, *labels: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, value in self.values.items():
            if name.split("{")[0] == metric:
                pairs = dict(part.split("=", 1) for part in name.split("{")[1].rstrip("}").split(","))
                found[" ".join(pairs[label].strip('"') for label in labels)] += int(value)
        return found


async def counters(client: httpx.AsyncClient) -> Counters:
    return Counters((await client.get("/metrics")).text)


async def ask(
    client: httpx.AsyncClient, model: str, prompt: list[int], output: int
) -> tuple[str, list[float]]:
    """Returns how the request ended, and when each event came, in seconds since it was sent."""
    began, times = time.perf_counter(), []
    body = {"model": model, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return str(answer.status_code), []
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return str(event["error"].get("code")), times
                times.append(time.perf_counter() - began)
    except httpx.HTTPError as error:
        return type(error).__name__, times
    return "answered", times


def at_percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


async def measure(options: argparse.Namespace) -> RecomputeOutcome:
    draw = random.Random(options.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        before = await counters(client)
        began = time.perf_counter()
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(options.prompts):
            prompt = [draw.randrange(1000, 40_000) for _ in range(options.tokens)]
            tasks.append(asyncio.create_task(ask(client, model, prompt, options.output)))
            if options.rate:
                await asyncio.sleep(1 / options.rate)
        answers = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
        await asyncio.sleep(1.5)  # the nodes report their last counters within this time
        after = await counters(client)
    ends = Counter(end for end, _ in answers)
    answered = [times for end, times in answers if end == "answered"]
    gaps = [later - earlier for times in answered for earlier, later in itertools.pairwise(times)]
    computed = after.total("tandem_node_prompt_tokens_computed_total") - before.total(
        "tandem_node_prompt_tokens_computed_total"
    )
    wanted = len(answered) * options.tokens
    transfers = after.by("tandem_node_transfers_finished_total", "role", "outcome")
    transfers.subtract(before.by("tandem_node_transfers_finished_total", "role", "outcome"))
    refused = ends["503"] + ends["429"]
    return RecomputeOutcome(
        prompts=options.prompts,
        answered=len(answered),
        refused=refused,
        failed=options.prompts - len(answered) - refused,
        seconds=seconds,
        prompt_tokens=wanted,
        prompt_tokens_computed=int(computed),
        prompt_tokens_twice=max(0.0, computed / wanted - 1) if wanted else 0.0,
        preemptions=int(
            after.total("tandem_node_preemptions_total") - before.total("tandem_node_preemptions_total")
        ),
        transfers={name: count for name, count in transfers.items() if count},
        failovers=int(after.total("tandem_failovers_total") - before.total("tandem_failovers_total")),
        first_token_p50_s=at_percentile([times[0] for times in answered if times], 0.5),
        first_token_p99_s=at_percentile([times[0] for times in answered if times], 0.99),
        gap_p99_s=at_percentile(gaps, 0.99),
        longest_gap_s=max(gaps, default=0.0),
        errors={end: count for end, count in ends.items() if end != "answered"},
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=int, default=180)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.0, help="prompts per second; 0: all at once")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    outcome = asyncio.run(measure(options))
    print(json.dumps(msgspec.to_builtins(outcome), indent=2))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(outcome))
    return 0 if outcome.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
