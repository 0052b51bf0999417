from __future__ import annotations

import pytest

from cluster.on_ray.runtime import import_ray, start_ray
from wire.errors import Unavailable


@pytest.mark.slow
@pytest.mark.parametrize("error", [Exception("timed out during startup"), RuntimeError("no"), OSError("no")])
def test_whatever_ray_says_when_it_cannot_start_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Slow: imports Ray."""

    def refuse(**options: object) -> None:
        raise error

    monkeypatch.setattr(import_ray(), "init", refuse)
    with pytest.raises(Unavailable, match=f"Ray did not start: {error}"):
        start_ray()
