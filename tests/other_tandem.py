"""Makes another version of Tandem, for tests with two versions in one cluster: a later one, made from this one, or the commit that the
environment variable TANDEM_OTHER names."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from tandem.wire.versions import WIRE_VERSION

ROOT = Path(__file__).parents[1]
LATER = WIRE_VERSION + 1
MESSAGES = ("handoff", "images", "lines", "nodes", "pooling", "requests", "sampling", "sharing", "tracing")


def make_other_tandem(place: Path) -> tuple[Path, int]:
    """Returns the folder of its package, and the version of its messages."""
    ref = os.environ.get("TANDEM_OTHER", "")
    if not ref:
        return make_later_tandem(place), LATER
    files = subprocess.run(["git", "archive", ref], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(place, filter="data")
    found = re.search(r"^WIRE_VERSION = (\d+)$", (place / "tandem/wire/versions.py").read_text(), re.MULTILINE)
    assert found is not None, f"{ref} says no version of its messages"
    return place, int(found[1])


def make_later_tandem(place: Path) -> Path:
    """Copies this version's files, adds a field to every message and to most sections of the settings, and raises the version by one."""
    shutil.copytree(ROOT / "tandem", place / "tandem", ignore=shutil.ignore_patterns("__pycache__"))
    wire = place / "tandem/wire"
    for name in MESSAGES:
        source = (wire / f"{name}.py").read_text(encoding="utf-8")
        (wire / f"{name}.py").write_text(_with_a_field_more(source), encoding="utf-8")
    for settings in ("cluster", "router", "node"):
        file = place / f"tandem/{settings}/config.py"
        file.write_text(_with_a_field_more(file.read_text(encoding="utf-8")), encoding="utf-8")
    source = (wire / "versions.py").read_text(encoding="utf-8")
    changed = source.replace(f"\nWIRE_VERSION = {WIRE_VERSION}\n", f"\nWIRE_VERSION = {LATER}\n")
    assert changed != source
    (wire / "versions.py").write_text(changed, encoding="utf-8")
    return place


def _with_a_field_more(source: str) -> str:
    lines = source.splitlines()
    classes = [part for part in ast.parse(source).body if isinstance(part, ast.ClassDef)]
    for struct in reversed(classes):
        fields = [part for part in struct.body if isinstance(part, ast.AnnAssign)]
        if fields and any("Struct" in ast.unparse(base) for base in struct.bases):
            lines.insert(fields[-1].end_lineno or 0, "    of_a_later_version: int = 7")
    return "\n".join(lines) + "\n"
