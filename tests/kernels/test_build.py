"""The library is compiled on first use: once, whole or not at all, and with a reason if it cannot be."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.kernels import build
from tandem.kernels.build import BuildFailed, library_path

FAKE = """#!/bin/sh
case "$*" in --version) echo fake 1.0; exit 0;; esac
echo "$*" >> {log}
while [ "$1" != "-o" ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only notes what it was asked; returns the notes' path."""
    log, script = tmp_path / "log", tmp_path / "fake-c++"
    write_compiler(script, FAKE.format(log=log))
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return log


def write_compiler(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_compiles_once_and_keeps_it(compiler: Path) -> None:
    path = library_path()
    assert path.read_text() == "compiled\n"
    commands = compiler.read_text().splitlines()
    assert library_path() == path
    assert compiler.read_text().splitlines() == commands
    assert sum("-mamx-bf16" in command for command in commands) <= 1
    assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == []


def test_a_compilation_that_was_ended_goes_on(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = len(list(build._SOURCES.glob("*.cpp"))) + 1
    run, done = build._run, []

    def ended(command: Sequence[str]) -> str:
        if "-shared" in command:
            raise BuildFailed("it was ended")
        done.append(command)
        return run(command)

    monkeypatch.setattr(build, "_run", ended)
    with pytest.raises(BuildFailed):
        library_path()
    monkeypatch.setattr(build, "_run", run)
    assert library_path().read_text() == "compiled\n"
    assert len(compiler.read_text().splitlines()) == expected, "nothing was compiled twice"


def test_processes_that_start_together_compile_once(compiler: Path) -> None:
    expected = len(list(build._SOURCES.glob("*.cpp"))) + 1

    def start() -> str:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from tandem.kernels.build import library_path; print(library_path())",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: start(), range(4)))
    assert len(set(paths)) == 1
    assert len(compiler.read_text().splitlines()) == expected


def test_changed_sources_are_compiled_anew(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a;")
    (sources / "a.h").write_text("// 1")
    monkeypatch.setattr(build, "_SOURCES", sources)
    first = library_path()
    (sources / "a.h").write_text("// 2")
    assert library_path() != first


def test_what_the_compiler_says_is_passed_on(compiler: Path, tmp_path: Path) -> None:
    write_compiler(
        tmp_path / "fake-c++",
        '#!/bin/sh\ncase "$*" in --version) exit 0;; esac\necho "no such flag" >&2\nexit 1\n',
    )
    with pytest.raises(BuildFailed, match="no such flag"):
        library_path()
    write_compiler(tmp_path / "fake-c++", FAKE.format(log=compiler))
    assert library_path().exists(), "a failure is not remembered"


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler"):
        library_path()


def test_a_cache_folder_that_cannot_be_written(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildFailed, match="cannot be written"):
        library_path()


def test_a_library_that_came_with_the_sources_is_taken(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = library_path()
    shipped = tmp_path / "compiled"
    build.ship(shipped)
    monkeypatch.setattr(build, "_SHIPPED", shipped)
    assert library_path() == made, "a compiler that CXX names is used"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert library_path().parent == shipped


def test_a_library_of_other_sources_is_left(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "compiled"
    build.ship(shipped)
    (shipped / "sources").write_text("0" * 64)
    monkeypatch.setattr(build, "_SHIPPED", shipped)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildFailed, match="there is no C"):
        library_path()
