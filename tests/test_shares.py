"""Successive commits take all shares of the long tests, from a clone alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import shares


def _git(folder: Path, *words: str) -> None:
    author = ("-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "shares.json"
    file.write_text(json.dumps({"a": ["1/3", "2/3", "3/3"]}))
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(shares, "FILE", file)
    return file


def _taken(capsys: pytest.CaptureFixture[str]) -> str:
    shares.main(["a"])
    return capsys.readouterr().out.strip()


def test_each_commit_takes_the_next_and_says_what_it_leaves_out(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = []
    for _ in range(4):
        taken.append(_taken(capsys))
        _git(file.parent, "commit", "-qm", "next", "--allow-empty")
    assert taken == ["1/3", "2/3", "3/3", "1/3"]
    shares.main([])
    assert capsys.readouterr().out == "a: 2/3 now; left out, the next first: 3/3, 1/3\n"


def test_what_ran_comes_last_whether_that_is_committed_or_not(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _git(file.parent, "commit", "-qm", "next", "--allow-empty")
    shares.main(["--ran"])
    assert json.loads(file.read_text()) == {"a": ["3/3", "1/3", "2/3"]}
    assert _taken(capsys) == "3/3"
    _git(file.parent, "commit", "-qam", "what ran")
    assert _taken(capsys) == "3/3"


def test_every_share_of_each_set_has_its_turn() -> None:
    sets = json.loads(shares.FILE.read_text())
    for name in ("test-clusters", "test-more"):
        assert set(sets[name]) == {f"{part}/{len(sets[name])}" for part in range(1, len(sets[name]) + 1)}
    run, makefile = ((shares.FILE.parents[1] / file).read_text() for file in (".ci/run", "Makefile"))
    for target in sets["others"]:
        assert f"\n{target}) part make {target} " in run
        assert f"\n{target}:" in makefile
    for file in sets["test-hosts"]:
        assert (shares.FILE.parents[1] / file).exists()
