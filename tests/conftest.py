"""What every test folder may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from cluster.models.store import prepare_model

# How long one example takes says how busy the machine is; every test has a limit of its own anyway.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, as `tandem serve` uses it. Fetched and converted on first use, then cached."""
    return Path(prepare_model("smollm2", lambda what, fraction: print(f"smollm2: {what}")).path)
