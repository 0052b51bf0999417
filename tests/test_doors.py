"""Everything that a user can set, type, ask, scrape, apply or copy is in the ledger, with the test that goes through it."""

from __future__ import annotations

import ast

import pytest

from tests.documents import ROOT
from tests.doors import known_doors, read_ledger, report


def test_every_door_has_a_test_or_a_reason() -> None:
    tests, reasons = read_ledger()
    known = known_doors()
    assert not sorted(known - tests.keys() - reasons.keys()), (
        "go through these as their users do, and let `pytest --record-doors` write it down"
    )
    assert not sorted((tests.keys() | reasons.keys()) - known), "these are gone: --record-doors drops them"
    assert not tests.keys() & reasons.keys()
    assert all(reasons.values()), "say why there is no test yet"
    print(report())


@pytest.mark.parametrize("file", sorted({test.partition("::")[0] for test in read_ledger()[0].values()}))
def test_the_tests_that_the_ledger_names_exist(file: str) -> None:
    there = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = {test.partition("::")[2] for test in read_ledger()[0].values() if test.startswith(f"{file}::")}
    assert named <= there
