"""The blocks of code in README, docs/ and the other pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```(.*)\n((?:(?!```).*\n)*?)```$", re.MULTILINE)


class Block(NamedTuple):
    page: str
    kind: str  # what stands after the backticks: a language, and for whom the block is
    text: str

    @property
    def name(self) -> str:
        first = next((line.strip() for line in self.text.splitlines() if line.strip()), "")
        return f"{self.page} `{self.kind}` {first[:60]}"


def pages() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").glob("*.md"))


def blocks(*languages: str) -> list[Block]:
    """All blocks, or those of the languages."""
    return [
        Block(str(page.relative_to(ROOT)), kind, text)
        for page in pages()
        for kind, text in _BLOCK.findall(page.read_text(encoding="utf-8"))
        if not languages or kind.partition(" ")[0] in languages
    ]
