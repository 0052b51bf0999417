"""These tests need the native library. They are skipped where no compiler can build it."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels import library
from tandem.kernels.compiler import BuildFailed
from tests.kernels import probes


@pytest.fixture(scope="session", autouse=True)
def _library() -> None:
    torch.set_num_threads(1)
    try:
        library.load()
    except BuildFailed as error:
        pytest.skip(str(error))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes `unit` by every (dtype, instruction set) that this processor runs, and `float_unit` by those of float32."""
    for name in {"unit", "float_unit"} & set(metafunc.fixturenames):
        try:
            units = [u for u in probes.available() if name == "unit" or u[0] == torch.float32]
        except BuildFailed:
            units = []
        metafunc.parametrize(name, units, ids=lambda u: f"{u[1]}-{str(u[0]).removeprefix('torch.')}")
