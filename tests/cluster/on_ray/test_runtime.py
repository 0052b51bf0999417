from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tandem.cluster.on_ray.runtime import import_ray, start_ray
from tandem.wire.errors import Unavailable


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


@pytest.mark.slow
def test_what_ray_starts_does_not_hear_signals_to_our_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: imports Ray. It starts its processes as here, with something to call in the child."""
    groups: list[int] = []

    def spawn() -> int:
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpgrp())"],
            stdout=subprocess.PIPE,
            check=True,
            preexec_fn=lambda: None,
        )
        return int(child.stdout)

    def init(**options: object) -> None:
        groups.append(spawn())
        raise RuntimeError("enough")

    monkeypatch.setattr(import_ray(), "init", init)
    with pytest.raises(Unavailable):
        start_ray()
    assert groups[0] != os.getpgrp()
    assert spawn() == os.getpgrp(), "no other processes are moved"
