"""The commands of docs/simulator.md that need no cluster work as they stand."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.cli import main
from tests.simulator.worlds import node_costs

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```sh run\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def test_there_are_some() -> None:
    assert LINES


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_page(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.json").write_bytes(msgspec.json.encode(node_costs(blocks=4000)))
    command, _, file = line.partition(" > ")
    with contextlib.redirect_stdout((tmp_path / (file or "out")).open("w", encoding="utf-8")):
        assert main(shlex.split(command)[1:]) == 0


def test_the_costs_fields_are_those_of_the_page() -> None:
    table = PAGE.split("| field | |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert set(type(node_costs()).__struct_fields__) - {"name"} <= named
