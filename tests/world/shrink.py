"""Makes a seed that breaks a promise smaller: leaves out requests, orders, faults and nodes as long as the same promise is broken, and
draws what is left. `python -m tests.world.shrink 17`, or with `--world control`, `--mutant NAME`, or `--without r3 f2` to draw what was
found before.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Collection

from tests.world import control, schedule
from tests.world.control_mutants import CONTROL_MUTANTS
from tests.world.diagram import Diagram
from tests.world.mutants import mutant
from tests.world.schedule import Outcome
from tests.world.search import WORLDS, fix_hashes

_VARIES = re.compile(r"[\w~-]*\d[\w.~-]*")


def promise(outcome: Outcome) -> str:
    """What was broken, without names and numbers; empty if nothing was."""
    said = _VARIES.sub("#", outcome.violations[0]) if outcome.violations else ""
    return re.sub(r"#(?:(?:, | and | \()#\)?)+", "#", said)  # some of a list may be left out


def shrink(every: list[str], is_broken: Callable[[Collection[str]], bool]) -> set[str]:
    """Returns what can be left out of `every`: with anything more left out, nothing is broken."""
    without: set[str] = set()
    size = max(1, len(every) // 2)
    while True:
        left = [part for part in every if part not in without]
        shrank = False
        for at in range(0, len(left), size):
            some = left[at : at + size]
            if is_broken(without | set(some)):
                without |= set(some)
                shrank = True
        if size == 1 and not shrank:
            return without
        size = max(1, size // 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--mutant", help="with this bug put in")
    parser.add_argument("--without", nargs="*", help="draw it without these parts")
    parser.add_argument("--world", choices=WORLDS, help="a control plane's mutant is put into that world")
    asked = parser.parse_args()
    fix_hashes("tests.world.shrink")
    run = WORLDS[asked.world or ("control" if asked.mutant in CONTROL_MUTANTS else "cluster")]
    with mutant(asked.mutant) if asked.mutant else contextlib.nullcontext():
        without = set(asked.without or ())
        if asked.without is None:
            first = run(asked.seed)
            if not (broken := promise(first)):
                print(f"seed {asked.seed} breaks no promise")
                return 1
            without = shrink(first.parts, lambda without: promise(run(asked.seed, without=without)) == broken)
        diagram = Diagram()
        if run is control.run:
            outcome = control.run(asked.seed, without=without, on_message=diagram.on_message)
        else:
            outcome = schedule.run(asked.seed, without=without, on_frame=diagram.on_frame)
    print(diagram.drawn(outcome))
    print(f"seed {asked.seed} --without {' '.join(sorted(without))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
