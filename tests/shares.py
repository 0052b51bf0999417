"""Which shares of the long tests `.ci/run` takes: those that ran longest ago.

`.ci/shares.json` has the shares of each set of tests, the one that ran longest ago first. A run that passes puts its shares last, and
the next commit may bring that along. A machine that cannot commit takes the file as it is in the repository, and from its first share
one further for each commit since, a merge being one: so a fresh clone needs no other state. The numbers of shares are odd primes
where they can be, so that runs of every second commit take all shares, too.

    python -m tests.shares            what this commit takes and leaves out
    python -m tests.shares NAME       the share of this set, such as 2/4
    python -m tests.shares --ran      this commit's shares have run
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).parents[1] / ".ci" / "shares.json"


def commits_since_change(file: Path) -> int:
    """How many commits came after the one that changed the file. None, if it has changes that are not committed."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=file.parent, capture_output=True, text=True).stdout.strip()

    changed = git("log", "-1", "--format=%H", "--", file.name)
    if not changed or git("status", "--porcelain", "--", file.name):
        return 0
    return int(git("rev-list", "--count", "--first-parent", f"{changed}..HEAD") or 0)


def in_turn(shares: Sequence[str], commits: int) -> list[str]:
    """The shares, the one to take first, when so many commits have each taken one since their order was written."""
    taken = commits % len(shares)
    return [*shares[taken:], *shares[:taken]]


def main(words: Sequence[str]) -> None:
    commits = commits_since_change(FILE)
    sets = {name: in_turn(shares, commits) for name, shares in json.loads(FILE.read_text()).items()}
    if "--ran" in words:
        rows = (f'  "{name}": {json.dumps(in_turn(shares, 1))}' for name, shares in sets.items())
        FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    elif words:
        print(sets[words[0]][0])
    else:
        for name, (share, *others) in sets.items():
            print(f"{name}: {share} now; left out, the next first: {', '.join(others)}")


if __name__ == "__main__":
    main(sys.argv[1:])
