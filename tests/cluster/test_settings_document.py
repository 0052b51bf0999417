"""docs/settings.md lists every setting there is, with its default."""

from __future__ import annotations

import re
from pathlib import Path as FilePath

import yaml

from docs.tables import settings_page
from tandem.base.settings import description_of
from tandem.cluster.commands.show_config import render
from tandem.cluster.config import DERIVED
from tandem.cluster.settings.combined import resolve
from tandem.cluster.settings.names import dotted, known_settings
from tandem.wire.nodes import Role

PAGE = FilePath(__file__).resolve().parents[2] / "docs" / "settings.md"
_ROW = re.compile(r"^\| `([\w.]+)` \| `([^`]*)` \|", re.MULTILINE)


def documented() -> dict[str, object]:
    rows: dict[str, object] = {}
    for name, default in _ROW.findall(PAGE.read_text(encoding="utf-8")):
        for role in Role if ".POOL." in name else ("",):
            setting = name.replace("POOL", role)
            assert setting not in rows, f"{setting} is there twice"
            if tuple(setting.split(".")) not in DERIVED:
                rows[setting] = yaml.safe_load(default)
    return rows


def defaults() -> dict[str, object]:
    """As `tandem config` prints them, where nothing is set."""
    found: dict[str, object] = {}

    def walk(section: dict[str, object], prefix: str) -> None:
        for name, value in section.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = value

    walk(yaml.safe_load(render(resolve([]))), "")
    return found


def test_the_page_says_what_the_fields_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert settings_page(page) == page, "a setting has changed: `make docs` writes the page's rows again"


def test_a_setting_without_a_row_gets_one_in_its_section() -> None:
    page = PAGE.read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `router.timeouts.total`"))
    lines = settings_page(page.replace(row + "\n", "")).splitlines()
    assert lines[lines.index(row) - 1].startswith("| `router.timeouts.")


def test_every_setting_says_what_it_is_for_and_is_documented_with_its_default() -> None:
    settings = known_settings().items()
    silent = [dotted(path) for path, setting in settings if path not in DERIVED and not description_of(setting)]
    assert not silent, "these need an about(...)"
    assert documented() == defaults()
