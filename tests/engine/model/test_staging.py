"""Arrays on their way to a device: many in one copy, each where its dtype wants it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.model import staging

DTYPES = (np.int32, np.int64, np.float32, np.uint8)
SHAPES = st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 5), st.integers(0, 5)))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=8))
def test_what_is_packed_is_unpacked(kinds: list[tuple[type, tuple[int, ...]]]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 100, shape).astype(dtype) for dtype, shape in kinds]
    packed = staging.pack(arrays, lambda size: torch.zeros(size, dtype=torch.uint8))
    for array, tensor in zip(arrays, staging.unpack(arrays, packed), strict=True):
        assert tensor.shape == array.shape
        assert torch.equal(tensor, torch.from_numpy(array))


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    [together] = staging.to_device_together([array], torch.device("cpu"))
    alone = staging.to_device(array, torch.device("cpu"))
    array[0] = 7
    assert together[0] == alone[0] == 7
