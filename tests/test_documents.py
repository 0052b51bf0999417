"""What the documents tell a reader to open or to type is there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.cli import make_parser
from tandem.cluster.settings.combined import resolve
from tandem.cluster.settings.layers import read_assignments
from tandem.cluster.settings.names import known_settings
from tandem.wire.nodes import Role
from tests.documents import Block, blocks
from tests.doors import passes

ROOT = Path(__file__).parent.parent
FILES = {path.name for path in ROOT.glob("[a-z]*/**/*.py")}
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
_PATH = re.compile(r"[A-Za-z][\w.*/-]*/(?:[\w.*-]+\.(?:py|yaml|md))?")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def inline(page: str) -> Iterator[str]:
    """What stands between backticks, also where a line ends in it."""
    for found in re.findall(r"`([^`]+)`", _CODE.sub("", page)):
        yield " ".join(found.split())


def typed(page: str) -> Iterator[str]:
    """The lines of the blocks that show commands: those of no other language."""
    for block in _CODE.findall(page):
        language, _, lines = block.removeprefix("```").removesuffix("```").partition("\n")
        if language.partition(" ")[0] in ("", "sh"):
            yield from lines.splitlines()


def page_of(target: str, near: str) -> Path:
    return (ROOT / target) if (ROOT / near).exists() else (ROOT / "docs" / target)


def anchors(text: str) -> set[str]:
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", _CODE.sub("", PAGES[name])):
        target, _, anchor = link.partition("#")
        file = page_of(target or name.removeprefix("docs/"), name)
        assert file.exists(), link
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_files_that_are_named_exist(name: str) -> None:
    for path in filter(_PATH.fullmatch, inline(PAGES[name])):
        assert next(ROOT.glob(path.rstrip("/")), None), path


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_file_that_is_named_without_its_folder_exists(name: str) -> None:
    """Or is one that the page has its reader save."""
    saved = re.findall(r"save it as\s+`(\w+\.py)`", PAGES[name])
    lost = [code for code in inline(PAGES[name]) if re.fullmatch(r"\w+\.py", code) and code not in (FILES | {*saved})]
    assert not lost


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_commands_are_ones_that_there_are(name: str) -> None:
    """Between backticks a command may stand without its arguments."""
    helps = make_parser().format_help()
    for command in inline(PAGES[name]):
        if found := re.match(r"tandem ([a-z][a-z-]*)", command):
            assert re.search(rf"^    {found[1]} ", helps, re.MULTILINE), command


@pytest.mark.parametrize("block", [block for block in blocks() if block.kind != "yaml"], ids=lambda block: block.name)
def test_a_block_is_one_that_its_reader_takes(block: Block) -> None:
    """Blocks of settings are read by tests/cluster/test_every_setting.py; those that are marked so are run, too."""
    language = block.kind.partition(" ")[0]
    if language == "json":
        json.loads(block.text)
    elif language == "python":
        ast.parse(block.text)
    elif language in ("sh", "bash"):
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for line in block.text.splitlines():
        if line.startswith("tandem ") and language in ("", "sh", "bash"):
            words = shlex.split(re.split(r" \|\|? | > ", line)[0], comments=True)[1:]
            assert make_parser().parse_args([word for word in words if word != "\\"]).run
    passes("block", block.name)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_what_is_made_can_be_made(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [*inline(PAGES[name]), *typed(PAGES[name])]
    assert {found[1] for command in commands if (found := re.match(r"make ([a-z-]+)", command))} <= targets


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_benchmarks_take_the_flags_that_are_shown(name: str) -> None:
    for command in [*inline(PAGES[name]), *typed(PAGES[name])]:
        if found := re.match(r"(?:python -m )?benchmarks\.(\w+)(.*)", command):
            files = [ROOT / "benchmarks" / f"{found[1]}.py", *(ROOT / "benchmarks" / "lib").glob("*.py")]
            source = "".join(file.read_text(encoding="utf-8") for file in files)
            for flag in re.findall(r"--[a-z-]+", found[2]):
                assert f'"{flag}"' in source, command


def members_of_classes() -> dict[str, set[str]]:
    """All classes that bear one name are taken together."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (file for package in ROOT.glob("*/py.typed") for file in package.parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                for inside in ast.walk(node):
                    match inside:
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            found[node.name].add(name)
                        case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
                            found[node.name].add(name)
                        case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)]):
                            found[node.name].add(name)
    return found


def test_the_methods_that_are_named_are_there() -> None:
    members = members_of_classes()
    for page in PAGES.values():
        for code in inline(page):
            if (found := re.fullmatch(r"([A-Z]\w+)\.(_?[a-z]\w*)(\(.*\))?", code)) and found[2] != "md":
                assert found[2] in members[found[1]], code


def test_the_settings_that_are_named_can_be_set() -> None:
    """Or are sections of some; what is set with it (`router.policy=round_robin`, `pools.decode: 2`) is taken off."""
    settings = known_settings()
    sections = {path[0] for path in settings if len(path) > 1}
    for page in PAGES.values():
        for code in inline(page):
            name = tuple(re.split(r"[=:]", code.replace("POOL", Role.DECODE), maxsplit=1)[0].split("."))
            if len(name) > 1 and name[0] in sections and not code.endswith((".py", ".md", ".yaml")):
                assert any(path[: len(name)] == name for path in settings), code


def test_the_values_that_are_named_can_be_given() -> None:
    """`router.policy=round_robin` between backticks; placeholders such as `scheduler.max_num_seqs=N` are left."""
    given = [
        (found[1], found[2], "a page")
        for page in PAGES.values()
        for code in inline(page)
        if (found := re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)=([^\s.N][^\s]*)", code))
        and tuple(found[1].split(".")) in known_settings()
    ]
    assert len(given) > 5
    for one in given:
        resolve([read_assignments([one])])


def test_a_version_is_that_of_one_release_or_on_the_way_to_the_next() -> None:
    """What /version says must tell what runs: it is not the last release's once something was changed since."""
    log = PAGES["CHANGELOG.md"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    releases = re.findall(r"^## ([\d.]+) \(\d+ \w+ \d{4}, commit [0-9a-f]{8}\)$", log, re.MULTILINE)
    assert [title for title in re.findall(r"^## (\S+)", log, re.MULTILINE) if title != "Unreleased"] == releases
    last = tuple(map(int, releases[0].split(".")))
    this = tuple(map(int, version.removesuffix(".dev0").split(".")))
    if re.search(r"^## Unreleased\n+\S", log, re.MULTILINE):
        assert version.endswith(".dev0")
        assert this > last
    else:
        assert version == releases[0]


def test_the_notice_names_what_we_are_built_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    notice = re.sub(r"\s+", " ", (ROOT / "NOTICE").read_text(encoding="utf-8")).lower()
    names = [re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]]
    assert not [name for name in names if name not in notice]
