"""What every test folder may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling

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


# Of tests/integration: deployments on a Ray that is started once.
ON_ONE_RAY = {
    "test_burst.py",
    "test_end_to_end.py",
    "test_images_served.py",
    "test_logs_from_anywhere.py",
    "test_nccl_connector.py",
    "test_official_client.py",
    "test_serve_realtime.py",
}


class FileScheduling(LoadScopeScheduling):
    """Gives whole files to processes, which keep what a file's tests share; and to one of them all that share a Ray."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if file.rpartition("/")[2] in ON_ONE_RAY else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, as `tandem serve` uses it. Fetched and converted on first use, then cached."""
    return Path(prepare_model("smollm2", lambda what, fraction: print(f"smollm2: {what}")).path)
