"""Runs schedules: `python -m tests.world.search --seconds 60`, `--seeds 17 18` with `--history` to read what happened."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.queues import Queue
from pathlib import Path

from tests.world import control, schedule
from tests.world.schedule import Outcome
from tests.world.seeds import FOUND

WORLDS = {"cluster": schedule.run, "control": control.run}  # a seed is a schedule of each


def run(seed: int, worlds: Sequence[str], *, with_faults: bool) -> Iterator[Outcome]:
    return (WORLDS[world](seed, with_faults=with_faults) for world in worlds)


def fix_hashes(module: str) -> None:
    """Begins this process again, unless texts have fixed hashes: the order of a set of texts depends on them, and with that the
    history of a seed."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        arguments = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, "PYTHONHASHSEED": "0"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--most", type=int, default=1 << 40, help="the most schedules")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--found", action="store_true", help="the seeds that were ever found to break a promise")
    parser.add_argument("--resume", type=Path, help="go on after the seeds of this file, and keep the sums in it")
    parser.add_argument("--history", action="store_true", help="print what happened")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--worlds", nargs="*", choices=WORLDS, default=[*WORLDS])
    asked = parser.parse_args()
    fix_hashes("tests.world.search")
    sums = Sums(asked.first) if asked.resume is None else Sums.kept_in(asked.resume, asked.first)
    named: Sequence[int] = [*FOUND] if asked.found else asked.seeds
    seeds: Iterable[int] = named or range(sums.next, sums.next + asked.most)
    began = time.monotonic() - sums.seconds
    until = time.monotonic() + 60 * asked.minutes
    for outcome in _outcomes(seeds, asked.processes, asked.worlds, with_faults=not asked.no_faults):
        sums.add(outcome)
        sums.seconds = time.monotonic() - began
        if asked.resume is not None:
            sums.keep_in(asked.resume)
        if asked.history:
            print("\n".join([*outcome.history, f"{outcome.frames} frames, all together {outcome.digest}"]))
        if not named and time.monotonic() > until:
            break
    print(sums.shown())
    return 1 if sums.broken else 0


def _outcomes(seeds: Iterable[int], processes: int, worlds: Sequence[str], *, with_faults: bool) -> Iterator[Outcome]:
    """The outcomes of the seeds, of several processes in whatever order they come."""
    if processes == 1:
        for seed in seeds:
            yield from run(seed, worlds, with_faults=with_faults)
        return
    context = multiprocessing.get_context("fork")
    done: Queue[Outcome | None] = context.Queue(4 * processes)
    workers = [
        context.Process(
            target=_work, args=(itertools.islice(seeds, i, None, processes), worlds, with_faults, done), daemon=True
        )
        for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            while (outcome := done.get()) is not None:
                yield outcome
    finally:
        for worker in workers:
            worker.terminate()


def _work(seeds: Iterable[int], worlds: Sequence[str], with_faults: bool, done: Queue[Outcome | None]) -> None:
    for seed in seeds:
        for outcome in run(seed, worlds, with_faults=with_faults):
            done.put(outcome)
    done.put(None)


class Sums:
    def __init__(self, first: int) -> None:
        self.next = first  # all seeds before it have been run
        self._ran: set[int] = set()  # later ones
        self.broken: list[int] = []
        self.schedules = 0
        self.simulated_s = self.seconds = 0.0
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.transfers: Counter[str] = Counter()

    @classmethod
    def kept_in(cls, file: Path, first: int) -> Sums:
        sums = cls(first)
        if file.exists():
            kept = json.loads(file.read_text())
            sums.next, sums.schedules, sums.broken = kept["next"], kept["schedules"], kept["broken"]
            sums.simulated_s, sums.seconds = kept["simulated_s"], kept["seconds"]
            sums.counts, sums.errors, sums.transfers = (
                Counter(kept[name]) for name in ("counts", "errors", "transfers")
            )
        return sums

    def keep_in(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({name: value for name, value in vars(self).items() if name != "_ran"}))

    def add(self, outcome: Outcome) -> None:
        if outcome.seed >= self.next:  # a seed is a schedule of each world
            self._ran.add(outcome.seed)
        while self.next in self._ran:
            self._ran.remove(self.next)
            self.next += 1
        self.schedules += 1
        self.simulated_s += outcome.seconds
        for name in (
            "requests",
            "answered",
            "faults",
            "frames",
            "steps",
            "preemptions",
            "tier_loads",
            "copied",
            "corrupted",
            "forged",
            "followed",
            "image_rows",
            "wrong_answers",
        ):
            self.counts[name] += getattr(outcome, name)
        self.errors.update(outcome.errors)
        self.transfers.update(outcome.transfers)
        if outcome.violations:
            self.broken.append(outcome.seed)
            print(f"seed {outcome.seed}: {outcome.violations[0]}", flush=True)

    def shown(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items())
        errors = ", ".join(f"{number} {name}" for name, number in self.errors.items()) or "none"
        transfers = ", ".join(f"{number} {name}" for name, number in self.transfers.items())
        rate = 60 * self.schedules / self.seconds
        return (
            f"{self.schedules} schedules in {self.seconds:.0f} s ({rate:.0f} a minute, {self.simulated_s / self.schedules:.0f} "
            f"simulated s each): {counts}; transfers: {transfers}; errors: {errors}; {len(self.broken)} broke a promise"
        )


if __name__ == "__main__":
    sys.exit(main())
