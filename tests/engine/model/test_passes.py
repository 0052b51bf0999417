"""Prompts that want logits for all tokens: a step is cut so that only few rows of logits are in memory at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.model import batching
from tandem.engine.model.batching import LOGIT_ROWS, RequestRows, cut_for_logits, hooks_of_pass
from tests.engine.model.hooks import Recorder


@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=6))
def test_passes_add_up_and_stay_small(work: list[tuple[int, bool]]) -> None:
    requests = RequestRows(8, 4096, 16, 1)
    wanting = set()
    for index, (count, wants) in enumerate(work):
        row = requests.add(str(index), [1] * count, count, [[1]])
        if wants:
            wanting.add(row)
    counts = {str(index): count for index, (count, _) in enumerate(work)}
    cut = cut_for_logits(requests, counts, wanting)
    assert {name: sum(one.get(name, 0) for one in cut) for name in counts} == counts
    assert set(cut[-1]) == set(counts)  # every request's newest token is in the last one
    for one in cut:
        assert all(one.values())
        assert sum(count for name, count in one.items() if requests.row(name) in wanting) <= LOGIT_ROWS


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_layer_is_waited_for_before_all_passes_and_saved_after_them(count: int) -> None:
    recorder = Recorder()
    for index in range(count):
        hooks = hooks_of_pass(recorder, index == 0, index == count - 1)
        for layer in range(2):
            if hooks is not None:
                hooks.wait_for_layer_load(layer)
                hooks.save_kv_layer(layer)
    calls = recorder.calls
    assert [layer for what, layer in calls if what == "load"] == [0, 1]
    assert [layer for what, layer in calls if what == "save"] == [0, 1]
    if count > 1:
        assert [what for what, _ in calls] == ["load", "load", "save", "save"]


def test_without_hooks_there_are_none() -> None:
    assert hooks_of_pass(None, True, False) is None
    assert batching.cut_for_logits(RequestRows(1, 8, 4, 1), {}, set()) == [{}]
