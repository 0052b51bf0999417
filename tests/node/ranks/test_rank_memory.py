"""The shared memory of a machine's ranks: each rank reads what the first one writes. And each rank's share of the machine."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tandem.base.errors import InternalError
from tandem.node.ranks.memory import SharedMemory, create_memory
from tandem.node.ranks.processes import shares_of

_ARRAYS = st.lists(
    arrays_of.arrays(st.sampled_from([np.int32, np.int64]), arrays_of.array_shapes(min_dims=1, max_dims=2, min_side=0)),
    max_size=6,
)


@given(st.lists(_ARRAYS, max_size=5))
def test_every_step_is_read_as_it_was_written(steps: list[list[np.ndarray]]) -> None:
    descriptor = create_memory()
    try:
        leader, follower = SharedMemory(descriptor, range(1, 2)), SharedMemory(descriptor, range(1, 2))
        for number, arrays in enumerate(steps, 1):
            leader.write(arrays, lambda: True)
            assert leader.written == number
            read = follower.read(1, number)
            assert [(a.dtype, a.shape) for a in read] == [(a.dtype, a.shape) for a in arrays]
            assert all(map(np.array_equal, read, arrays))
            assert not leader.behind(number)
    finally:
        os.close(descriptor)


def test_a_step_is_not_written_over_one_that_a_rank_still_wants() -> None:
    descriptor = create_memory()
    leader, follower = SharedMemory(descriptor, range(1, 3)), SharedMemory(descriptor, range(1, 3))
    os.close(descriptor)
    numbers = [np.arange(4)]
    leader.write(numbers, lambda: True)
    leader.write(numbers, lambda: True)
    follower.read(1, 1)
    assert leader.behind(1) == [2]
    asked = iter([True, False])
    leader.write(numbers, lambda: next(asked))  # rank 2 has not taken the first step
    assert leader.written == 2
    follower.read(2, 1)
    leader.write(numbers, lambda: True)
    assert leader.written == 3


def test_what_does_not_fit_is_no_step() -> None:
    descriptor = create_memory()
    memory = SharedMemory(descriptor, range(1, 2))
    os.close(descriptor)
    huge = np.broadcast_to(np.int64(0), (1 << 26,))
    with pytest.raises(InternalError, match="larger than"):
        memory.write([huge], lambda: True)
    assert memory.written == 0


def test_a_beat_is_seen_by_the_others() -> None:
    descriptor = create_memory()
    leader, follower = SharedMemory(descriptor, range(1, 2)), SharedMemory(descriptor, range(1, 2))
    os.close(descriptor)
    follower.beat(1)
    assert leader.beat_of(1) == 1


@given(st.lists(st.integers(0, 127), unique=True, max_size=20), st.integers(0, 64), st.integers(2, 16))
def test_ranks_share_the_cores(cores: list[int], threads: int, size: int) -> None:
    shares = shares_of(cores, threads, size)
    assert len(shares) == size
    assert all(share.threads >= 1 for share in shares)
    if len(cores) >= size:
        assert [core for share in shares for core in share.cores] == cores
        assert all(share.cores for share in shares)
    else:
        assert all(share.cores == cores for share in shares)
