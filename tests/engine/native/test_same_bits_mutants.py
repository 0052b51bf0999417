"""Two bugs that other kernels have, put into ours: the test of the same bits finds both.

The mutants are compiled from a changed copy of the sources, for processors of any kind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tandem.kernels import build, library
from tests.engine.native import test_same_bits

_LOOP = "for (int i = 0; i < count; i++, at += kPanel) {"
_TURNED = (
    "const auto* const group = at; for (int n = 0; n < count; n++) {"
    " const int i = %s ? count - 1 - n : n; at = group + i * kPanel;"
)
# When the terms of a group are summed from its end on.
MUTANTS = {"a split by batch size": "g.m > 8", "a reduction by thread": "g.threads > 1"}


@pytest.fixture(params=MUTANTS)
def mutant(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library of this process is a mutant meanwhile."""
    sources = tmp_path / "kernels"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("compiled", "__pycache__"))
    file = sources / "gemm_fma.h"
    text = file.read_text(encoding="utf-8")
    assert text.count(_LOOP) == 1, "the product's loop has changed: change this test, too"
    file.write_text(text.replace(_LOOP, _TURNED % MUTANTS[request.param]), encoding="utf-8")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "_SHIPPED", sources / "compiled")
    monkeypatch.setattr(build, "left_out", lambda: frozenset(build.UNIT_FLAGS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_outcome", [])


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mutant")
def test_a_mutant_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_same_bits, "SEEDS", range(3))
    with pytest.raises(AssertionError, match="has other bits"):
        test_same_bits.test_no_company_changes_a_bit((torch.float32, "portable"), "llama")
