"""docs/read-it.md names a dozen files that a person can read in an afternoon. They are counted here."""

from __future__ import annotations

import re

from tests.wings import ROOT, wing_of

MOST_LINES = 3500
PAGE = (ROOT / "docs" / "read-it.md").read_text(encoding="utf-8")
FILES = re.findall(r"^\| \d+ \| `([^`]+)` \|", PAGE, re.MULTILINE)


def test_the_path_is_twelve_files_of_the_core() -> None:
    assert len(FILES) == len(set(FILES)) == 12
    assert not [file for file in FILES if wing_of(file)], "a wing may be deleted"


def test_the_path_can_be_read_in_an_afternoon() -> None:
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert sum(lines.values()) <= MOST_LINES, lines


def test_what_the_path_promises_to_show_is_there() -> None:
    for file, names in re.findall(r"^\| \d+ \| `([^`]+)` \| (.*) \|$", PAGE, re.MULTILINE):
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_.]+)`", names):
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", source), f"{file} has no {name}"
