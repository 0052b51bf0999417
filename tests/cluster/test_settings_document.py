"""docs/settings.md lists every setting there is, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tandem.cluster.commands.show_config import render
from tandem.cluster.settings import resolve
from tandem.wire.nodes import Role

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
_ROW = re.compile(r"^\| `([\w.]+)` \| `([^`]*)` \|", re.MULTILINE)


def documented() -> dict[str, object]:
    rows: dict[str, object] = {}
    for name, default in _ROW.findall(PAGE.read_text(encoding="utf-8")):
        for role in Role if ".POOL." in name else ("",):
            setting = name.replace("POOL", role)
            assert setting not in rows, f"{setting} is there twice"
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


def test_every_setting_is_documented_with_its_default() -> None:
    assert documented() == defaults()
