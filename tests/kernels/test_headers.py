"""A header of the kernels includes what it needs, so headers may be included in any order."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from tandem.kernels import build
from tests.more import more

FOLDER = Path(build.__file__).parent
BF16 = ("bf16", "dot", "tile", "panels", "compact")


def headers(unit: str) -> list[str]:
    """Those that a unit of this kind may include."""
    every = sorted(path.name for path in FOLDER.glob("*.h"))
    if unit == "unit_avx2.cpp":
        return [name for name in every if not any(part in name for part in (*BF16, "amx"))]
    other = ("fma", "rows.h", "dot" if unit == "unit_amx.cpp" else "amx")
    return [name for name in every if name == "rows.h" or not any(part in name for part in other)]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine().lower() != "x86_64", reason="these units are of x86-64 alone")
@pytest.mark.parametrize("backwards", [True, *more([False])])  # the units themselves have them in an order, too
@pytest.mark.parametrize("kind", ["unit_avx2.cpp", "unit_amx.cpp", *more(["unit_avx512bf16.cpp"])])
def test_a_units_headers_may_be_included_in_any_order(kind: str, backwards: bool, tmp_path: Path) -> None:
    source = tmp_path / "all.cpp"
    ordered = sorted(headers(kind), reverse=backwards)
    source.write_text("".join(f'#include "{name}"\n' for name in ordered))
    command = [build.find_compiler(), *build.FLAGS, *build.UNIT_FLAGS[kind], f"-I{FOLDER}", str(source)]
    done = subprocess.run([*command, "-fsyntax-only"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[:2000]
