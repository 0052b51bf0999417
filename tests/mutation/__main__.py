"""Changes the product a little, in a copy of the tree, and asks the tests: a sample of mutants, each killed or alive.

    python -m tests.mutation --sample 40 --seed 1                      of the core
    python -m tests.mutation --files engine/scheduling --sample 20     of some files or folders
    python -m tests.mutation --tests tests/world --sample 20           by these tests, in place of those of the file's room
    python -m tests.mutation --at HEAD~3 --sample 20                   the same mutants, by the tests of another commit
    python -m tests.mutation --every-killer --sample 20                all tests that notice a mutant, not only the first

A mutant meets the tests that call the function it is in, first those that call the fewest. Results are kept by the content of product and
tests; a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutation.changes import Mutant, mutants_of
from tests.mutation.tree import Killers, Tree, calls_of
from tests.wings import ROOT, lies_in, tracked, wing_of

_NOT_CORE = ("tests/", "benchmarks/", "docs/", "tandem/", "manifests/", "kernels/", "simulator/", "loadgen/", "setup.py")  # fmt: skip
_TESTED_IN = {"prefill_node": "tests/node", "decode_node": "tests/node"}  # rooms without tests of their own


def files_of(chosen: Sequence[str]) -> list[str]:
    """Those that are chosen, or the core's."""
    product = [file for file in sorted(tracked()) if file.endswith(".py") and not lies_in(file, _NOT_CORE)]
    if not chosen:
        return [file for file in product if wing_of(file) is None]
    places = [each if each.endswith(".py") else f"{each.rstrip('/')}/" for each in chosen]
    return [file for file in product if lies_in(file, places)]


def sample_of(root: Path, files: Sequence[str], size: int, seed: int) -> list[Mutant]:
    there = [mutant for file in files for mutant in mutants_of(file, (root / file).read_bytes())]
    return sorted(random.Random(seed).sample(there, min(size, len(there))), key=lambda each: each.name)


def met_by(mutant: Mutant, calls: dict[str, Any], most_s: float) -> tuple[list[str], float]:
    """The tests that a mutant meets, and how long they take. What is outside of functions runs where the file is imported."""
    where, anywhere = f"{mutant.file}:{mutant.function}", f"{mutant.file}:"
    met, total = [], 0.0
    for test, call in sorted(calls.items(), key=lambda each: (len(each[1]["calls"]), each[0])):
        called = (each == where if mutant.function else each.startswith(anywhere) for each in call["calls"])
        if any(called) and (not met or total + call["took"] <= most_s):
            met.append(test)
            total += call["took"]
    return met, total


def judged(tree: Tree, mutant: Mutant, calls: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    met, take_s = met_by(mutant, calls, options.most_s)
    if not met:
        return {"verdict": "not called", "by": []}
    words = [*met] if options.every_killer else ["-x", *met]
    with tree.changed(mutant.file, mutant.applied((tree.folder / mutant.file).read_bytes())):
        failed = tree.run(words, 60 + 5 * take_s, Killers())
    verdict = "timeout" if failed is None else "killed" if failed else "alive"
    return {"verdict": verdict, "by": failed or [], "met": len(met)}


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", nargs="*", default=[], metavar="PATH")
    parser.add_argument("--tests", nargs="*", default=[], metavar="PATH")
    parser.add_argument("--marked", default="not slow and not integration and not more", metavar="MARKS", help="(%(default)s)")  # fmt: skip
    parser.add_argument("--at", metavar="COMMIT")
    parser.add_argument("--every-killer", action="store_true")
    parser.add_argument("--most-s", type=float, default=30, metavar="S", help="the longest that a mutant's tests may take")  # fmt: skip
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "mutation", metavar="FOLDER")
    return parser.parse_args()


def main() -> int:
    options = asked()
    file = options.kept / "results.jsonl"
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    known = {row.pop("key"): row for row in rows}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutation-") as made:
        tree = Tree(Path(made), options.at)
        for mutant in sample_of(tree.folder, files_of(options.files), options.sample, options.seed):
            room = mutant.file.partition("/")[0]
            tests = tuple(options.tests or [_TESTED_IN.get(room, f"tests/{room}")])
            state, calls = calls_of(tree, tests, options.marked, options.kept)
            key = f"{state} {options.most_s:g} {options.every_killer} {mutant.start} {mutant.name}"
            if key not in known:
                known[key] = judged(tree, mutant, calls, options)
                with file.open("a") as kept:
                    kept.write(json.dumps({"key": key, **known[key]}) + "\n")
            verdict, by = known[key]["verdict"], known[key]["by"]
            counts[verdict] += 1
            print(f"{verdict:10}  {mutant.name}" + (f"  ({len(by)}: {by[0]})" if by else ""), flush=True)
    noticed = counts["killed"] + counts["timeout"]
    print(f"{noticed} of {counts.total()} noticed:", ", ".join(f"{number} {what}" for what, number in counts.items()))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
