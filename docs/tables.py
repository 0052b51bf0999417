"""Generates the parts of the pages that follow from the code. `make docs` rewrites the pages; tests compare them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path as FilePath

from tandem.base.settings import description_of
from tandem.cluster.commands.show_config import scalar
from tandem.cluster.config import DERIVED, TandemConfig
from tandem.cluster.settings.names import dotted, known_settings, value_at
from tandem.cluster.wings import foreign_flags
from tandem.router.http.request_fields import FIELDS
from tandem.wire.nodes import Role

DOCS = FilePath(__file__).resolve().parent

_ROW = re.compile(r"^\| `([\w.]+)` \|")
_POOL = re.compile(rf"^pools\.(?:{'|'.join(role.value for role in Role)})\.(?!nodes$)")


def settings_page(page: str) -> str:
    """Returns the page with each setting's row generated from its field. A new setting's row goes after the last of its section."""
    rows = dict(_rows())
    lines: list[str] = []
    there: set[str] = set()
    for line in page.splitlines():
        found = _ROW.match(line)
        if found is None:
            lines.append(line)
        elif found[1] in rows and found[1] not in there:
            there.add(found[1])
            lines.append(rows[found[1]])
    for name in [name for name in rows if name not in there]:
        lines.insert(_place_for(name, lines), rows[name])
    return "\n".join(lines) + "\n"


def _place_for(name: str, lines: list[str]) -> int:
    named = [(place, found[1]) for place, line in enumerate(lines) if (found := _ROW.match(line))]

    def shared(other: str) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(other, name, strict=False)))

    return 1 + max(named, key=lambda one: (shared(one[1]), one[0]))[0]


def _rows() -> Iterator[tuple[str, str]]:
    for path, kind in known_settings().items():
        if path not in DERIVED:
            name = _POOL.sub("pools.POOL.", dotted(path))
            about = description_of(kind).replace("|", "\\|")
            yield name, f"| `{name}` | `{scalar(value_at(TandemConfig(), path))}` | {about} |"


def vllm_page(page: str) -> str:
    for flags in foreign_flags():
        page = _with_table(page, flags.table())
    return page


def api_page(page: str) -> str:
    return _with_table(page, FIELDS.lines())


def _with_table(page: str, lines: Iterator[str]) -> str:
    """Returns the page with the rows of the table that has the same head."""
    head, first, *rows = lines
    before, _, after = page.partition(f"{head}\n{first}\n")
    after = re.sub(r"\A(?:\|.*\n)*", "", after)
    return before + "\n".join((head, first, *rows)) + "\n" + after


PAGES = {"settings.md": settings_page, "from-vllm.md": vllm_page, "api.md": api_page}


def main() -> int:
    for name, written in PAGES.items():
        file = DOCS / name
        before = file.read_text(encoding="utf-8")
        after = written(before)
        if after != before:
            file.write_text(after, encoding="utf-8")
            print(f"{file} was rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
