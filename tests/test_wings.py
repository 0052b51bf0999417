"""The core imports no wing, and a wing imports only those that it says it needs. `python -m tests.wings --each` deletes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.base.wings import find_wings, is_there
from tests.wings import ROOT, WINGS, documented, modules_of, tracked, who_imports, wing_of, with_dependents


@pytest.mark.parametrize("name", WINGS)
def test_only_a_wing_that_needs_it_imports_a_wing(name: str) -> None:
    allowed = set(with_dependents([name]))
    product = [
        file for file in tracked() if wing_of(file) not in allowed and not file.startswith(("tests/", "benchmarks/"))
    ]
    assert not who_imports([name], product)


@pytest.mark.parametrize("name", WINGS)
def test_a_wing_is_there_with_its_tests(name: str) -> None:
    for path in (*WINGS[name].product, *WINGS[name].tests):
        assert (ROOT / path).exists(), path


def test_the_page_lists_the_wings() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = [row for row in documented() if row not in page]
    assert not missing, "docs/architecture.md lacks:\n" + "\n".join(missing)


def test_each_folder_of_a_wing_says_when_to_skip_it() -> None:
    said = ("What it is:", "Skip it when:", "Enter at:", "Joins at:", "Tested by:")
    for name, wing in WINGS.items():
        pages = [ROOT / path / "README.md" for path in wing.product if (ROOT / path / "README.md").is_file()]
        assert pages, f"{name} has no README.md"
        for page in pages:
            text = page.read_text(encoding="utf-8")
            missing = [part for part in said if part not in text]
            assert not missing, f"{page.relative_to(ROOT)} does not say {missing}"


PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tandem"}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_each_package_says_when_to_skip_it(package: str) -> None:
    page = (ROOT / package / "README.md").read_text(encoding="utf-8")
    said = ("What it is:", "Skip it when:", "Enter at:", "Files:", "Tested by:")
    missing = [part for part in said if part not in page]
    assert not missing, f"{package}/README.md does not say {missing}"
    entrance, tests = (page.split(part)[1].split("\n\n")[0] for part in ("Enter at:", "Tested by:"))
    named = [ROOT / package / name for name in re.findall(r"`([\w/]+\.\w+)`", entrance)]
    named += [ROOT / name for name in re.findall(r"tests/[\w/.]+", tests)]
    assert named
    lost = [str(path.relative_to(ROOT)) for path in named if not path.exists()]
    assert not lost, f"{package}/README.md names what is not there: {lost}"


def test_a_row_of_a_deleted_wing_counts_for_nothing() -> None:
    assert [found.__name__ for found in find_wings(("tandem.base.nowhere", "tandem.base.wings"))] == [
        "tandem.base.wings"
    ]
    assert not is_there("tandem.nowhere.at_all")


def test_an_error_inside_a_wing_is_no_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_broken_wing.py").write_text("import a_module_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        find_wings(["a_broken_wing"])


def test_the_modules_of_several_paths_are_all_found() -> None:
    """What is imported is compared with these: with none, no import would count."""
    paths = ("base/wings.py", "cluster/wings.py")
    assert modules_of(path for path in paths) == {"tandem.base.wings", "tandem.cluster.wings"}
