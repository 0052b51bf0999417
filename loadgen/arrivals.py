"""When requests are sent, where nobody waits for an answer before sending the next."""

from __future__ import annotations

import numpy as np

from tandem.wire.errors import ConfigurationError


def poisson(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    """Seconds from the run's beginning, exponentially far apart, the last exactly at `count / rate`: given where a
    Poisson process's last arrival is, the others stay Poisson, and every seed offers the same load."""
    if rate <= 0:
        raise ConfigurationError(f"the rate must be above 0 requests a second, not {rate:g}")
    times = np.cumsum(rng.exponential(size=count))
    return [float(time) for time in times * (count / rate / times[-1])] if count else []
