"""The pages that people follow: every command is run by a test or says what it needs, every file is one that Tandem reads,
every message that is quoted is one that it says, and the pictures are what their script draws."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from PIL import Image

from tandem.cluster.settings.combined import resolve
from tandem.cluster.settings.layers import read_file
from tandem.wire.tracing import TracePhase

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = {
    name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in (
        "quickstart",
        "from-vllm",
        "from-ray-serve-llm",
        "troubleshooting",
        "tuning",
        "simulator",
        "recipes",
        "comparison",
    )
}
_BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


@pytest.mark.parametrize("name", GUIDES)
def test_every_command_is_run_or_says_what_it_needs(name: str) -> None:
    for kind, text in _BLOCK.findall(GUIDES[name]):
        if kind in ("sh run", "sh serve", "python run", "yaml", "text"):
            continue  # tests/integration/test_guides_run.py, and below
        assert re.fullmatch(r"sh needs=(network|cluster|gpu|kubernetes)", kind), f"{name}: {kind or text}"
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def recipes() -> list[tuple[str, str]]:
    return [
        (title, text)
        for title, section in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", GUIDES["recipes"], re.MULTILINE)
        for kind, text in _BLOCK.findall(section)
        if kind == "yaml"
    ]


@pytest.mark.parametrize(("title", "text"), recipes(), ids=lambda given: given.splitlines()[0])
def test_every_recipe_is_a_file_that_tandem_takes(tmp_path: Path, title: str, text: str) -> None:
    (tmp_path / "tandem.yaml").write_text(text)
    config = resolve([read_file(tmp_path / "tandem.yaml")]).config
    assert config.model.path == (
        yaml.safe_load(text)["model"] if isinstance(yaml.safe_load(text)["model"], str) else config.model.path
    )


def quoted() -> list[str]:
    cells = re.findall(r'^\| ([^|]*"[^|]*) \|', GUIDES["troubleshooting"], re.MULTILINE)
    return [words for cell in cells for words in re.findall(r'"([^"]+)"', cell)]


@pytest.mark.parametrize("words", quoted())
def test_every_message_that_is_quoted_is_said_somewhere(words: str) -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8") for package in ROOT.glob("*/py.typed") for path in package.parent.rglob("*.py")
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that are written in several pieces
    for piece in filter(None, map(str.strip, words.split("…"))):
        assert piece in source, piece


def test_what_a_trace_is_shown_to_say_is_what_it_says() -> None:
    (shown,) = (text for kind, text in _BLOCK.findall(GUIDES["quickstart"]) if kind == "text" and "trace " in text)
    phases = re.findall(r"^(?:router|decode-0) +([a-z]+)", shown, re.MULTILINE)
    assert len(phases) > 8
    assert set(phases) <= {phase.value for phase in TracePhase}


def test_every_code_of_an_error_in_the_page_is_one_that_the_api_has() -> None:
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    for status, code in re.findall(r"^\| (\d{3}) `(\w+)` \|", GUIDES["troubleshooting"], re.MULTILINE):
        assert re.search(rf"^\| [\d, ]*{status}[\d, ]* \|.*`{code}`", api, re.MULTILINE), code


def test_every_row_of_the_comparison_says_where_it_was_read() -> None:
    table, _, sources = GUIDES["comparison"].partition("## Where this was read")
    compared = re.findall(r"^\| ([^|*]+) \|(?: [^|]* \|){6}$", table, re.MULTILINE)
    named = re.findall(r"^\| ([^|]+) \|(?: [^|]* \|){2}$", sources, re.MULTILINE)
    assert [row for row in compared if row != "what it is"] == named[1:]
    assert len(named) > 30


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "figures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_what_their_script_draws() -> None:
    for name, text in script("draw").pictures().items():
        drawn = (DOCS / "figures" / name).read_text(encoding="utf-8")
        assert drawn == text, "`make docs` draws them again"


@pytest.mark.parametrize("name", ["page-light", "page-dark"])
def test_the_pictures_of_the_page_show_the_page_that_stands(name: str) -> None:
    with Image.open(DOCS / "figures" / f"{name}.png") as picture:
        shown = picture.info.get("page")
    assert shown == script("page").digest(), "`python docs/figures/page.py` takes them again"
