"""What users feel of a batch on a real cluster: one prefill node and one decode node on this machine.

    python -m benchmarks.beside_batch --trace FILE [--begin 0] [--seconds 60] [--speed 1] [--lengths 0.05] [--turns 3] [--lines 300] [--json FILE]

Plays a part of a recorded trace in turns, alone and beside a batch of so many lines of 400 tokens in and 100 out. Beside the batch the part is
played again until the batch is completed. Its last play, in which it ends, is in no figure but the batch's own: when it was completed, compared
with what it said with a tenth of its lines answered. The nodes' own counters tell how much of what users left idle its lines used. `tandem why`
explains single requests, and `--out` keeps the cluster's output.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.lib.engines import random_prompts
from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.processes import adopt_orphans
from benchmarks.lib.servers import model_folder, played, running, tandem_system
from benchmarks.lib.tables import at_least, at_most, table_of
from benchmarks.recompute import counters
from tandem.base.errors import Unavailable
from tandem.cluster.saving import results_folder
from tandem.loadgen.api import RequestShape
from tandem.loadgen.load import LoadStream
from tandem.loadgen.metrics import summarize
from tandem.loadgen.timeline import Timeline
from tandem.loadgen.traces import read_trace, replay
from tandem.loadgen.vocabulary import IdVocabulary, load_tokenizer
from tandem.loadgen.workload import Session

LINE_INPUT, LINE_OUTPUT = 400, 100
NODES = 2
LOOK_S = 0.5
COMPLETIONS = "/v1/completions"
COLUMNS = {"": "{label}", "requests": "{succeeded}"} | {
    f"{name} {at}, ms": f"{{{field}.{at}:.0f}}"
    for name, field in (("first token", "ttft_ms"), ("gap", "itl_ms"))
    for at in ("p50", "p90", "p99")
}


async def answered_batch(http: httpx.AsyncClient, model: str, lines: int) -> float:
    """Returns by which part of its time the batch ended at another time than it said with a tenth of its lines answered."""
    prompts = random_prompts(lines, LINE_INPUT, 40_000, random.randrange(1 << 31))
    asked = [{"model": model, "prompt": prompt, "max_tokens": LINE_OUTPUT, "ignore_eos": True} for prompt in prompts]
    content = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body})
        for number, body in enumerate(asked)
    )
    answer = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": content.encode()})
    wanted = {"input_file_id": answer.json()["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    told = (await http.post("/v1/batches", json=wanted)).raise_for_status().json()
    foretold: float | None = None
    while told["status"] != "completed":
        await asyncio.sleep(LOOK_S)
        told = (await http.get(f"/v1/batches/{told['id']}")).raise_for_status().json()
        if told["status"] in ("failed", "expired") or told["request_counts"]["failed"]:
            raise Unavailable(f"the batch failed: {told}")
        if foretold is None and told["request_counts"]["completed"] >= lines / 10:
            foretold = told.get("estimated_completion_at")
    if foretold is None:
        raise Unavailable("the batch was too short to say when it would end: more --lines")
    began, ended = float(told["in_progress_at"]), float(told["completed_at"])
    return abs(foretold - ended) / max(ended - began, 1.0)


class BesideBatch:
    def __init__(self, url: str, model: str, sessions: Callable[[], list[Session]]) -> None:
        """`sessions` draws other prompts each time: what an earlier play left in the caches would hide what a batch takes."""
        self._url, self._shape, self._sessions = url, RequestShape(model), sessions
        self.found: dict[str, list[Timeline]] = {"alone": [], "beside a batch": []}
        self.used: list[float] = []  # by play: the part of what users left idle in which lines ran
        self.estimates_off: list[float] = []

    async def play(self) -> LoadStream:
        sessions = self._sessions()
        arrivals = [session.arrival_s or 0.0 for session in sessions]
        return await played(self._url, self._shape, sessions, arrivals=arrivals)

    async def alone(self) -> None:
        self.found["alone"] += (await self.play()).timelines

    async def beside(self, lines: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60.0, trust_env=False) as http:
            batch = asyncio.create_task(answered_batch(http, self._shape.model, lines))
            while not batch.done():
                before, began = await asyncio.to_thread(counters, self._url), time.monotonic()
                timelines = (await self.play()).timelines
                node_seconds, after = NODES * (time.monotonic() - began), await asyncio.to_thread(counters, self._url)
                if not batch.done():
                    after.subtract(before)
                    self.found["beside a batch"] += timelines
                    self.used.append(used_of_idle(after, node_seconds))
            self.estimates_off.append(await batch)


def used_of_idle(gained: Counter[str], node_seconds: float) -> float:
    lines_s = gained["tandem_node_idle_seconds_total"]
    return lines_s / (node_seconds - (gained["tandem_node_step_seconds_total"] - lines_s))


def measure(options: argparse.Namespace) -> BesideBatch:
    model, folder = model_folder(options.model), results_folder(options.out)
    rows = [row for row in read_trace(options.trace) if 0 <= row.arrival_s - options.begin < options.seconds]
    rows = [dataclasses.replace(row, arrival_s=row.arrival_s - options.begin) for row in rows]
    vocabulary = IdVocabulary(load_tokenizer(model))

    def sessions() -> list[Session]:
        return replay(rows, vocabulary, random.randrange(1 << 31), options.speed, options.lengths)

    adopt_orphans()
    flags = ("--prefill", "1", "--decode", "1", "--set")
    with (
        tempfile.TemporaryDirectory() as batches,
        running(
            tandem_system("", "Tandem 1P+1D", model, *flags, f"router.batches_folder={batches}"), folder
        ) as started,
    ):
        found = BesideBatch(started.system.url, started.model, sessions)
        asyncio.run(found.play())  # no turn is the first
        for turn in range(options.turns):
            say(f"turn {turn + 1} of {options.turns}")
            asyncio.run(found.alone())
            asyncio.run(found.beside(options.lines))
    return found


def main() -> int:
    parser = parser_of(__doc__, out="results/beside-batch")
    parser.add_argument("--trace", type=Path, required=True, help="in Azure's or Mooncake's format")
    parser.add_argument("--begin", type=float, default=0.0, help="of the part, in seconds of the trace (%(default)g)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the part (%(default)g)")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as recorded (%(default)g)")
    parser.add_argument(
        "--lengths", type=float, default=0.05, help="of prompts and answers, times the recorded (%(default)g)"
    )
    parser.add_argument("--turns", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--lines", type=int, default=300, help="of each batch (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="(%(default)s)")
    options = parser.parse_args()
    found = measure(options)
    alone, beside = (summarize(name, timelines, options.seconds) for name, timelines in found.found.items())
    if not (found.used and alone.ttft_ms and alone.itl_ms and beside.ttft_ms and beside.itl_ms):
        raise Unavailable("there is nothing to compare: more --lines, or another part of the trace")
    floors = [
        at_most("p99 first token beside a batch, of that alone", beside.ttft_ms.p99 / alone.ttft_ms.p99, 1.05),
        at_most("p99 gap between tokens beside a batch, of that alone", beside.itl_ms.p99 / alone.itl_ms.p99, 1.05),
        at_most("requests that failed", alone.failed + beside.failed, 0),
        at_least("used of the node-seconds that users left idle", statistics.fmean(found.used), 0.9),
        at_most("the batch's end, off what it said", max(found.estimates_off), 0.2),
    ]
    figures = {"alone": alone, "beside": beside, "used": found.used, "estimates_off": found.estimates_off}
    return report(options, figures, table_of("Users' requests", [alone, beside], COLUMNS), floors=floors)


if __name__ == "__main__":
    run(main)
