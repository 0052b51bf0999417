"""docs/exact.md says of each way to compute a model whether its bits are the same; where it promises that, it is so."""

from __future__ import annotations

import pytest

from tests.engine.model.exact import paths
from tests.more import more

NATIVE = [way for way in paths.WAYS if way.native]


def test_the_page_has_a_row_for_each_way() -> None:
    assert list(paths.written_rows()) == [way.name for way in paths.WAYS]


@pytest.mark.parametrize("way", [NATIVE[0], *more(NATIVE[1:])], ids=lambda way: f"{way.kind}-{way.dtype}")
def test_what_is_promised_is_so(way: paths.Way) -> None:
    row = paths.row(way, paths.measure(way))
    assert row == paths.written_rows()[way.name]
    assert row.count(" same ") == 5
