"""Marks further cases of a parametrized test (other widths, block sizes and models), which only `make test-more` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def more(cases: Iterable[Any]) -> list[Any]:
    """Returns the cases with the mark. A tuple holds one value for each of the test's parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.more) for case in cases]
