"""What every test folder may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.model_store import prepare_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, as `tandem serve` uses it. Fetched and converted on first use, then cached."""
    return Path(prepare_model("smollm2", lambda what, fraction: print(f"smollm2: {what}")).path)
