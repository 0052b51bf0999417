"""What the tool changes, which tests a mutant meets, and a run of it through its command on files of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import files_of, met_by, sample_of
from tests.mutation.changes import Mutant, mutants_of
from tests.wings import ROOT, wing_of

SOURCE = '''"""Text."""
LIMIT: int = 3


def most(values, *, default=0):
    """Text."""
    log.info("é %d", LIMIT + 1)
    if not values:
        return default
    found = max(values, key=abs)
    self.found = found  # text
    return found if found < LIMIT and self.open else LIMIT
'''.encode()


def changed(before: str, after: str) -> str:
    (mutant,) = [each for each in mutants_of("a.py", SOURCE) if (each.before, each.after) == (before, after)]
    return mutant.applied(SOURCE).decode()


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("3", "4", "LIMIT: int = 4"),
        ("0", "1", "def most(values, *, default=1):"),
        ("not values", "(not not values)", "    if (not not values):"),
        ("max(values, key=abs)", "(max(values))", "    found = (max(values))"),
        ("self.found = found", "pass", "    pass  # text"),
        ("found < LIMIT", "(found <= LIMIT)", "    return found if (found <= LIMIT) and self.open else LIMIT"),
        ("found < LIMIT and self.open", "(found < LIMIT or self.open)", "    return found if (found < LIMIT or self.open) else LIMIT"),
    ],
)  # fmt: skip
def test_one_place_is_changed_and_nothing_else(before: str, after: str, line: str) -> None:
    difference = set(changed(before, after).splitlines()) - set(SOURCE.decode().splitlines())
    assert difference == {line}


def test_what_only_a_person_reads_is_left_alone() -> None:
    assert not [each for each in mutants_of("a.py", SOURCE) if each.before.startswith(("log", "LIMIT + 1"))]


@pytest.mark.parametrize("file", ["engine/scheduling/scheduler.py", "kvtransfer/protocol/consumer.py"])
def test_every_mutant_of_the_product_is_python(file: str) -> None:
    source = (ROOT / file).read_bytes()
    found = mutants_of(file, source)
    assert len(found) > 50
    for mutant in found:
        compile(mutant.applied(source), file, "exec")


def test_a_mutant_meets_the_tests_that_call_its_function_and_the_narrowest_first() -> None:
    calls = {
        "wide": {"took": 1.0, "calls": ["a.py:5", "b.py:1"]},
        "narrow": {"took": 1.0, "calls": ["a.py:5"]},
        "other": {"took": 1.0, "calls": ["a.py:9"]},
        "long": {"took": 99.0, "calls": ["a.py:5", "b.py:1", "b.py:2"]},
    }
    within, outside = (Mutant("a.py", function, 6, 0, 1, "", "", "") for function in (5, 0))
    assert met_by(within, calls, 30.0) == (["narrow", "wide"], 2.0)
    assert met_by(outside, calls, 30.0)[0] == ["narrow", "other", "wide"]


def test_a_seed_is_a_sample_of_the_core_alone() -> None:
    files = files_of([])
    assert "engine/scheduling/scheduler.py" in files
    assert not [file for file in files if wing_of(file) or file.startswith(("tests/", "benchmarks/"))]
    one, again, other = (sample_of(ROOT, files[:30], 20, seed) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.slow
@pytest.mark.more
def test_the_command_says_which_mutants_are_noticed_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Slow: it runs tests in a copy of the tree."""
    command = [sys.executable, "-m", "tests.mutation", "--files", "wire/versions.py", "--tests", "tests/wire/test_versions.py"]  # fmt: skip
    command += ["--sample", "3", "--kept", str(tmp_path)]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True).stdout
        for _ in range(2)
    )
    assert second == first.partition("\n")[2], "it does not record again what tests call"
    assert " of 3 noticed: " in second
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert {row["verdict"] for row in rows} <= {"killed", "alive", "timeout", "not called"}
