"""Two deployments, one of which knows the other."""

from __future__ import annotations

import pytest

from tests.router.conftest import RunningRouter, StartRouter


@pytest.fixture
def two(start_router: StartRouter) -> tuple[RunningRouter, RunningRouter]:
    code = start_router(model_name="code")
    return start_router(other_models={"code": code.url, "fast-code": f"{code.url}/"}), code
