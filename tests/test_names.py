"""One word for each thing: what the glossary rules out stands nowhere, and a class name means one class."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "api",
    "base",
    "cluster",
    "decode_node",
    "encode_node",
    "engine",
    "http_server",
    "kernels",
    "kvtransfer",
    "loadgen",
    "machine",
    "node",
    "prefill_node",
    "router",
    "simulator",
    "wire",
)
GLOSSARY = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
# A participle or an adjective says what was done to a thing, not what the thing is. These are messages and errors, named by
# what has happened, and words that are nouns as well.
EVENTS = {"Cancelled", "Forbidden", "Holding", "Landed", "Open", "Overloaded", "Recalled", "Unauthorized"}
NOUNS = {"Embedding", "Finding", "Mapping", "Ping", "Pooling", "Ranking", "Reasoning", "Wing"}
OF_FUSION = {"Fused"}  # engine/model/fused
OF_API = {"Sampled"}  # api/openai/sampling.py


def forbidden() -> list[str]:
    """The words of the glossary's last column, and of the sentence below its table."""
    section = GLOSSARY.split("\n## Glossary\n")[1].split("\n## ")[0]
    rows = [line.rsplit("|", 2)[1] for line in section.splitlines() if line.startswith("| ")]
    sentence = section.split("these words stand nowhere:")[1]
    return re.findall(r"`([^`]+)`", " ".join([*rows, sentence]))


def written() -> dict[Path, str]:
    """The product, its tests, benchmarks and documents, without the glossary itself."""
    files = [path for folder in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / folder).rglob("*")]
    files += [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "manifests").rglob("*")]
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in (".py", ".md", ".yaml", ".cpp", ".h")
        and path.is_file()
        and path != Path(__file__)
        and path.name != "CHANGELOG.md"
    }
    page = ROOT / "docs/architecture.md"
    before, rest = texts[page].split("\n## Glossary\n")
    texts[page] = before + rest.partition("\n## ")[2]
    return texts


def classes() -> dict[str, set[str]]:
    """By name, the files of the product that define such a class."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(part, ast.ClassDef):
                    found[part.name].add(str(path.relative_to(ROOT)))
    return found


def test_the_glossary_rules_words_out() -> None:
    assert {"hand-over", "nobody", "be it"} <= set(forbidden())


def test_forbidden_words_stand_nowhere() -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, forbidden()))})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path, text in written().items()
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert not found, "the glossary in docs/architecture.md has other words for these:\n" + "\n".join(found)


def test_a_class_name_means_one_class() -> None:
    twice = {name: sorted(files) for name, files in classes().items() if len(files) > 1 and not name.startswith("_")}
    assert not twice


def test_classes_are_nouns() -> None:
    participles = {name for name in classes() if re.fullmatch(r"[A-Z][a-z]*(?:ed|ing|en)", name)}
    assert participles <= EVENTS | NOUNS | OF_FUSION | OF_API, "name the thing, not what was done to it"
