"""What every test folder may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tandem.cluster.models.store import prepare_model

# How long one example takes says how busy the machine is; every test has a limit of its own anyway.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What imports make is there to stay: to look through it for garbage again and again takes longer than torch."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, as `tandem serve` uses it. Fetched and converted on first use, then cached."""
    return Path(prepare_model("smollm2", lambda what, fraction: print(f"smollm2: {what}")).path)
