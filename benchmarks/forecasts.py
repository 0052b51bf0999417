"""What forecasts are worth on a real cluster: changes of its sizes are foretold, made, and graded by what came.

    python -m benchmarks.forecasts --trace FILE [--changes N] [--within S] [--trace-scale X] [--trace-speed X] [--model NAME] [--json FILE]

It starts a cluster of one prefill and one decode node, plays recorded traffic at it with `tandem bench`, and has it grow and shrink by a node of
each role in turn. Before each change the cluster is asked what that will bring (`/admin/foretell`), as `tandem scale` asks; after it, the requests
that began when the new sizes served are compared with that by the controller's own code. A cluster that serves waits a minute and sixty requests
for each grade; here it is as many requests as come in its share of `--within`, and twenty at least, which is what the interval is too narrow for.
How many cores were busy before it is among the figures: no forecast knows of a machine that changes its speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.machine import busy_cores
from benchmarks.lib.servers import STOPPED_WITHIN_S, TREE, model_folder, running, tandem_system
from benchmarks.lib.tables import table_of
from tandem.base.errors import Unavailable
from tandem.cluster.control import Expectation
from tandem.cluster.pools.foresight.grading import grade, score_of
from tandem.loadgen.traces import read_trace
from tandem.router.page_state import PageState
from tandem.wire.forecasts import FEWEST_REQUESTS, GRADED_REQUESTS, Forecast, GradedForecast, MeasuredRequest

KEY = "operator-of-this-benchmark"
STEPS = (("prefill", 2), ("prefill", 1), ("decode", 2), ("decode", 1))
START_S = 240.0  # usually ten seconds
LOOK_S = 0.5
LONGEST_S = 10.0  # the most that is waited for requests that take as long as the longest that was known


class Cluster:
    def __init__(self, url: str, ends_at: float) -> None:
        self.url, self.ends_at = url, ends_at
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=30.0, trust_env=False
        )

    def page(self) -> PageState:
        return msgspec.json.decode(self._http.get("/ui/state").raise_for_status().content, type=PageState)

    def order(self, action: str, pools: dict[str, int]) -> bytes:
        return self._http.post(f"/admin/{action}", json={"pools": pools}).raise_for_status().content

    def until(self, done: Callable[[PageState], bool], what: str, within_s: float) -> PageState:
        deadline = min(time.monotonic() + within_s, self.ends_at)
        while time.monotonic() < deadline:
            try:
                if done(page := self.page()):
                    return page
            except httpx.TransportError:
                pass  # it starts
            time.sleep(LOOK_S)
        raise Unavailable(f"within {within_s:.0f} s, or the time of all: not {what}")


def known(page: PageState, since: float, ended_since: float = 0.0) -> list[MeasuredRequest]:
    """The requests that began since then and were answered whole, in the order in which they ended."""
    whole = [one for one in page.latest if one.is_whole and one.began_at >= since and one.ended_at >= ended_since]
    return [
        MeasuredRequest(one.request_id, page.now - one.ended_at, one.total_s, one.first_token_s, one.token_s)
        for one in sorted(whole, key=lambda one: one.ended_at)
    ]


def is_as_wanted(page: PageState) -> bool:
    wanted = sum(pool.wanted for pool in page.pools)
    return 0 < wanted == sum(pool.ready for pool in page.pools) == sum(not node.why for node in page.nodes)


def change(cluster: Cluster, role: str, size: int, share_s: float) -> GradedForecast | str:
    """Makes one change and grades what was said of it. Returns the reason if nothing was."""
    began = time.monotonic()
    cluster.until(
        lambda page: len(known(page, page.nodes_since)) >= FEWEST_REQUESTS, "enough requests to foretell from", 120.0
    )
    expected = msgspec.json.decode(cluster.order("foretell", {role: size}), type=Expectation)
    say(f"{role} → {size}: {expected.said}")
    cluster.order("scale", {role: size})
    cluster.until(lambda page: {pool.role: pool.wanted for pool in page.pools}.get(role) == size, "ordered", 30.0)
    served_at = cluster.until(is_as_wanted, f"{size} {role} nodes", START_S).now
    if expected.forecast is None:
        return expected.not_foretold
    return _graded(cluster, expected.forecast, served_at, began + share_s)


def _graded(cluster: Cluster, forecast: Forecast, served_at: float, until: float) -> GradedForecast:
    opens = served_at + min(forecast.longest_s, LONGEST_S)

    def enough(page: PageState) -> bool:
        came = len(known(page, served_at, opens))
        return came >= GRADED_REQUESTS or (came >= FEWEST_REQUESTS and time.monotonic() >= until)

    page = cluster.until(enough, "enough requests to grade by", 120.0)
    return grade(forecast, known(page, served_at, opens), time.time())


@contextmanager
def serving(model: Path, folder: Path, ends_at: float) -> Iterator[Cluster]:
    keys = json.dumps([{"name": "operator", "key": KEY, "operator": True}])
    sizes = ("--prefill", "1", "--decode", "1")
    system = tandem_system("tandem", "Tandem", model, *sizes, "--set", f"router.api_keys={keys}")
    with running(system, folder):
        cluster = Cluster(system.url, ends_at)
        cluster.until(is_as_wanted, "serving", START_S)
        yield cluster


@contextmanager
def traffic(url: str, model: Path, options: argparse.Namespace) -> Iterator[None]:
    """Plays the trace while it is entered."""
    lasts_s = options.within * options.trace_speed
    # All of a trace takes minutes to make.
    requests = sum(row.arrival_s <= lasts_s for row in read_trace(options.trace))
    flags = [
        "--url", url, "--workload", "trace", "--trace", options.trace.resolve(), "--trace-speed", options.trace_speed,
        "--trace-scale", options.trace_scale, "--prompt-format", "ids", "--tokenizer", model, "--requests", requests,
    ]  # fmt: skip
    bench = subprocess.Popen(
        [sys.executable, "-m", "tandem.cluster.cli", "bench", *map(str, flags)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,  # what goes wrong is shown
        env={**os.environ, "PYTHONPATH": str(TREE), "TANDEM_API_KEY": KEY},
    )  # fmt: skip
    try:
        yield
    finally:
        bench.terminate()
        bench.wait(STOPPED_WITHIN_S)


def play(options: argparse.Namespace) -> dict[str, Any]:
    ends_at = time.monotonic() + options.within
    busy = busy_cores()
    model = model_folder(options.model)
    graded: list[GradedForecast] = []
    not_foretold: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(model, Path(folder), ends_at) as cluster,
        traffic(cluster.url, model, options),
    ):
        for number, (role, size) in zip(range(options.changes), itertools.cycle(STEPS)):
            share_s = (ends_at - time.monotonic()) / (options.changes - number)
            try:
                found = change(cluster, role, size, share_s)
            except Unavailable as error:
                say(str(error))
                break
            if isinstance(found, str):
                not_foretold.append(found)
            else:
                graded.append(found)
    score = score_of(graded)
    return {
        "asked": options.changes,
        "graded": score.graded,
        "not_foretold": not_foretold,
        "cores busy before": round(busy, 2),
        "figures": [
            {"figure": one.what, "changes": one.graded, "inside": one.inside, "median error": round(one.error, 3)}
            for one in score.figures
        ],
        "changes": msgspec.to_builtins(graded),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--trace-scale", type=float, default=0.02)
    parser.add_argument("--trace-speed", type=float, default=0.5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--within", type=float, default=690.0, help="seconds for all of it (%(default)s)")
    options = parser.parse_args()
    found = play(options)
    return report(options, found, table_of(f"{found['graded']} of {found['asked']} changes graded", found["figures"]))


if __name__ == "__main__":
    run(main)
