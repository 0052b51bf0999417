"""Runs the commands of the guides unchanged, one page after another, in an empty folder. Each run has its own loopback interface, so
that a page's port is free whatever else runs on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("quickstart", "from-vllm", "from-ray-serve-llm", "troubleshooting", "tuning", "batches")
_BLOCK = re.compile(r"^```(sh|python) (run|serve)\n((?:.*\n)*?)```$", re.MULTILINE)

PRELUDE = """
set -euo pipefail
ip link set lo up
serving=
finish() {
  status=$?
  if [ -n "$serving" ]; then kill -TERM $serving; wait $serving || status=1; fi
  exit $status
}
trap finish EXIT
"""
SERVE = """
( exec %s ) > serve.log 2>&1 &
serving=$!
for _ in $(seq 240); do
  curl -sf http://127.0.0.1:8000/health > /dev/null && break
  kill -0 $serving || { cat serve.log; exit 1; }
  sleep 0.5
done
curl -sf http://127.0.0.1:8000/health > /dev/null
"""


def script_of(page: str) -> str:
    """The commands that a reader of the page types. `tandem serve` runs in the background, and must end with status 0 afterwards."""
    parts = [PRELUDE]
    for language, what, text in _BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8")):
        if what == "serve":
            parts.append(SERVE % text.strip())
        elif language == "python":
            parts.append(f"python - <<'PAGE'\n{text}PAGE\n")
        else:
            parts.append(text)
    return "".join(parts)


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_commands_work_as_they_stand(page: str, tmp_path: Path, smollm2_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a loopback of its own needs root, unshare and iproute2")
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", script_of(page)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    log = tmp_path / "serve.log"
    served = log.read_text() if log.exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{served}"
