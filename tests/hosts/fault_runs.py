"""The whole fault table, on two prefill hosts, two decode hosts and a router host.

    make test-lab MINUTES=90
    python tests/hosts/fault_runs.py --minutes 8 --only 'reset|killed'

Each fault is done several times, in the middle of requests of every phase, over links of 100 Mbit, 1 Gbit and 10 Gbit. One line
for each run (the requests of one phase under one fault) goes to results/lab/runs.jsonl at once; where something was bad, what
the hosts said goes to results/lab/logs. Started again, it goes on where it was: what is there for this commit and model is not done again. Ends with status 1 when something was what it must not be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fault_cluster import RATES, FaultCluster
from fault_event import LoadProcess, Questions, Reference, Run, Scene
from fault_table import Fault, all_faults
from lab import ROOT, Lab
from lab_model import KV_BYTES_PER_TOKEN, VOCABULARY, make_tiny_model
from serving import give_kernels, give_model
from stalls import Stalls
from tools import install_absent, why_impossible

from tandem.cluster.chaos.report import rule_of_three

RESULTS = ROOT / "results" / "lab" / "runs.jsonl"
LONG_S = 60.0  # faults from this length on are done less often
REPETITIONS, REPETITIONS_OF_LONG = 3, 2
_PLAY_S = 10.0  # how long a scene takes besides the fault itself
_START_S = 60.0  # start no cluster with less time left than this


def commit() -> str:
    """The name of the tested version: the commit, with a mark for changes that are not committed."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no").strip()
    return git("rev-parse", "--short=10", "HEAD").strip() + ("+changes" if changed else "")


@dataclasses.dataclass(frozen=True)
class Event:
    fault: Fault
    repetition: int

    @property
    def rate(self) -> str:
        return self.fault.rate or list(RATES)[self.repetition % len(RATES)]


def plan(faults: Iterable[Fault]) -> Iterator[Event]:
    """Yields every fault once, then every fault again, so that a run that is cut short has tried all of them."""
    listed = list(faults)
    for repetition in range(max(REPETITIONS, REPETITIONS_OF_LONG)):
        for fault in listed:
            if repetition < (REPETITIONS_OF_LONG if fault.seconds >= LONG_S else REPETITIONS):
                yield Event(fault, repetition)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Reads the results, without a last line that was cut off when the process ended."""
    lines = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


class Table:
    """Plays events on clusters of the lab. It makes a new cluster when one has not recovered from an event."""

    def __init__(
        self,
        folder: Path,
        model: str,
        deadline: float,
        logs: Path,  # of what serves, where something was what it must not be
        write: Callable[[Run], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._model = model
        self._deadline = deadline
        self._logs = logs
        self._write = write
        self._say = say
        self._reference = Reference()

    def play(self, events: list[Event]) -> None:
        waiting = list(events)
        starts = 0
        while waiting and time.monotonic() + _START_S < self._deadline:
            starts += 1
            with ExitStack() as stack:
                lab = stack.enter_context(Lab(self._folder / f"start-{starts}", hosts=5, ssh=False, boot_ids=True))
                scene = self._scene(lab, stack)
                self._play_on(scene, waiting)

    def _scene(self, lab: Lab, stack: ExitStack) -> Scene:
        if self._model == "tiny":
            model, vocabulary, kv_bytes = (make_tiny_model(self._folder / "tiny-model"), VOCABULARY, KV_BYTES_PER_TOKEN)
            give_kernels(lab)
        else:
            from tandem.cluster.models.store import prepare_model

            model = give_model(lab, Path(prepare_model(self._model, lambda what, share: None).path))
            shape = json.loads((model / "config.json").read_text())
            vocabulary = int(shape["vocab_size"])
            head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
            kv_bytes = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * head * 4
        cluster = stack.enter_context(FaultCluster(lab, model))
        self._say(f"the cluster serves after {cluster.started_s:.0f} s")
        load = LoadProcess(lab, cluster.url)
        stack.callback(load.close)
        stalls = Stalls(cluster.serving)
        stack.callback(stalls.close)
        scene = Scene(cluster, load, stalls, Questions(vocabulary), self._reference, kv_bytes)
        scene.learn()
        for rate in RATES:
            for run in scene.play(None, 0, rate):
                assert run.ok, f"in peace, at {rate}: {run.faults}"
        return scene

    def _play_on(self, scene: Scene, waiting: list[Event]) -> None:
        """Plays the waiting events. Returns when none is left, the time is up, or the cluster must be made again."""
        while (event := self._next_that_fits(waiting)) is not None:
            waiting.remove(event)
            began = time.monotonic()
            runs = scene.play(event.fault, event.repetition, event.rate)
            for run in runs:
                self._write(run)
            bad = [f"{run.phase}: {fault}" for run in runs for fault in run.faults]
            worst = max(runs, key=lambda run: run.over_s)
            self._say(
                f"{event.fault.name} #{event.repetition} at {event.rate}: "
                f"{sum(run.right for run in runs)} of {sum(run.requests for run in runs)} right, "
                f"{sum(run.typed_errors for run in runs)} typed errors, longest gap {worst.longest_gap_s:.1f} s, "
                f"blocks back after {runs[0].mended_s:.1f} s ({time.monotonic() - began:.0f} s)"
            )
            for line in bad:
                self._say(f"   ✗ {line}")
            if bad:
                scene.keep_logs(self._logs / f"{re.sub('[^a-z0-9]+', '-', event.fault.name)}-{event.repetition}")
            if any("still not" in line for line in bad):
                return  # what is left over would count against the next event
            if gone := scene.without_ray():
                self._say(f"Ray has taken {', '.join(gone)} for dead: the next fault meets another cluster")
                return

    def _next_that_fits(self, waiting: list[Event]) -> Event | None:
        left = self._deadline - time.monotonic()
        return next((event for event in waiting if event.fault.seconds + _PLAY_S < left), None)


def report(lines: list[dict[str, Any]]) -> str:
    """A table with a row for each fault, and a summary."""
    rows = [
        f"{'fault':48} {'runs':>4} {'requests':>8} {'right':>6} {'errors':>6} {'bad':>4} {'gap s':>6} {'mended s':>8}"
    ]
    names = sorted({line["fault"] for line in lines})
    for name in names:
        of = [line for line in lines if line["fault"] == name]
        rows.append(
            f"{name:48} {len(of):4} {sum(x['requests'] for x in of):8} {sum(x['right'] for x in of):6} "
            f"{sum(x['typed_errors'] for x in of):6} {sum(bool(x['faults']) for x in of):4} "
            f"{max(x['over_s'] for x in of):6.1f} {max(x['mended_s'] for x in of):8.1f}"
        )
    bad = [line for line in lines if line["faults"]]
    events = {(line["fault"], line["repetition"]) for line in lines}
    requests = sum(line["requests"] for line in lines)
    wrong = sum("wrong" in fault for line in lines for fault in line["faults"])
    rows.append(
        f"{len(names)} faults, done {len(events)} times: {len(lines)} runs, {requests} requests, {wrong} wrong, "
        f"{sum(line['typed_errors'] for line in lines)} typed errors, {len(bad)} runs with something that must not be"
    )
    if lines and not bad:
        rows.append(f"nothing bad in {len(lines)} runs: fewer than {rule_of_three(len(lines))} have something bad")
    if requests and not wrong:
        rows.append(f"none of {requests} answers was wrong: fewer than {rule_of_three(requests)} are")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=90.0, metavar="M", help="in all (%(default)s)")
    parser.add_argument("--model", default="tiny", metavar="NAME", help="tiny, made here, or smollm2 (%(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help="faults whose names it is found in")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="(%(default)s)")
    parser.add_argument("--list", action="store_true", help="the faults' names, and do nothing")
    options = parser.parse_args()
    faults = [fault for fault in all_faults() if re.search(options.only, fault.name)]
    if not faults:
        parser.error(f"--only {options.only!r} is found in no fault's name: --list shows them")
    if options.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    if reason := why_impossible():
        sys.exit(reason)
    # When a signal ends this program, it must still remove its hosts.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    install_absent()
    deadline = time.monotonic() + options.minutes * 60
    version, began = commit(), time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def own() -> list[dict[str, Any]]:
        return [line for line in read_lines(options.out) if (line["commit"], line["model"]) == (version, options.model)]

    done = {(line["fault"], line["repetition"]) for line in own()}
    events = [event for event in plan(faults) if (event.fault.name, event.repetition) not in done]

    def say(text: str) -> None:
        print(f"{(time.monotonic() - began) / 60:5.1f} min  {text}", flush=True)

    def write(run: Run) -> None:
        busy = os.getloadavg()[0]  # others on this machine make every gap longer
        line = {"commit": version, "model": options.model, "unix_time": round(time.time()), "load": busy}
        with options.out.open("a") as file:
            file.write(json.dumps(line | dataclasses.asdict(run)) + "\n")

    say(f"{len(events)} of {len(list(plan(faults)))} times that faults are done are left, for commit {version}")
    with tempfile.TemporaryDirectory(prefix="tandem-lab-") as folder:
        Table(Path(folder), options.model, deadline, options.out.parent / "logs", write, say).play(events)
    lines = [line for line in own() if re.search(options.only, line["fault"])]
    print(report(lines))
    return 1 if any(line["faults"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
