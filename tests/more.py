"""Cases beyond those that show a behaviour: further pairings of widths, blocks and models. `make test-more` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def more(cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrized test, marked. A tuple is one value for each of the test's parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.more)
        for case in cases
    ]
