"""The connector of docs/connectors.md, where Python finds it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "connectors.md"


@contextmanager
def installed_example(directory: Path) -> Iterator[None]:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    (directory / "local_connector.py").write_text(blocks[0])
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop("local_connector", None)
