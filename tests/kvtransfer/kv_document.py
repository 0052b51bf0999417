"""Makes the example connector and tier of docs/connectors.md importable."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = "local_connector", "folder_tier"  # in this order
DOCUMENT = Path(__file__).parents[2] / "docs" / "connectors.md"


@contextmanager
def installed_example(directory: Path) -> Iterator[None]:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len(blocks) == len(EXAMPLES)
    for name, block in zip(EXAMPLES, blocks, strict=True):
        (directory / f"{name}.py").write_text(block)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        for name in EXAMPLES:
            sys.modules.pop(name, None)
