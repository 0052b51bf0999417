"""Runs schedules: `python -m tests.world.search --seconds 60`, `--seeds 17 18` with `--history` to read what happened."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.world.schedule import Outcome, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=1 << 40)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--history", action="store_true")
    parser.add_argument("--no-faults", action="store_true")
    asked = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of a set of texts depends on it, and with that the history of a seed
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.world.search", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    began = time.monotonic()
    seeds = asked.seeds or range(asked.first, asked.first + asked.most)
    bad: list[Outcome] = []
    totals = dict.fromkeys(("requests", "answered", "faults", "frames", "steps"), 0)
    errors: dict[str, int] = {}
    count = 0
    simulated = 0.0
    for seed in seeds:
        outcome = run(seed, with_faults=not asked.no_faults)
        count += 1
        simulated += outcome.seconds
        for name in totals:
            totals[name] += getattr(outcome, name)
        for name, number in outcome.errors.items():
            errors[name] = errors.get(name, 0) + number
        if asked.history:
            print("\n".join(outcome.history))
        if outcome.violations:
            bad.append(outcome)
            print(f"seed {seed}: {outcome.violations[0]}", flush=True)
        if not asked.seeds and time.monotonic() - began > asked.seconds:
            break
    took = time.monotonic() - began
    print(
        f"{count} schedules in {took:.1f} s ({60 * count / took:.0f} a minute, {simulated / count:.0f} simulated s each): "
        + ", ".join(f"{number} {name}" for name, number in totals.items())
        + f"; errors: {errors}; {len(bad)} broke a promise"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
