from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.loadgen.load import poisson


@given(st.integers(1, 300), st.floats(0.01, 1000), st.integers(0, 2**32))
def test_arrivals_are_in_order_and_offer_exactly_the_rate(count: int, rate: float, seed: int) -> None:
    times = poisson(np.random.default_rng(seed), count, rate)
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(count / rate)


def test_gaps_are_exponential_as_a_poisson_process_has_them_and_the_same_with_the_same_seed() -> None:
    first, second, other = (poisson(np.random.default_rng(seed), 20, 2.0) for seed in (1, 1, 2))
    assert first == second
    assert first != other
    gaps = np.diff(poisson(np.random.default_rng(7), 20_000, 10.0))
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.std() == pytest.approx(0.1, rel=0.03)  # as large as the mean: neither bursts nor a metronome
    assert np.mean(gaps > 0.1) == pytest.approx(np.exp(-1), rel=0.03)


def test_a_rate_above_zero_is_needed() -> None:
    assert poisson(np.random.default_rng(0), 0, 1.0) == []
    for rate in (0.0, -1.0):
        with pytest.raises(ConfigurationError):
            poisson(np.random.default_rng(0), 3, rate)
