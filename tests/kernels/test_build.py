"""The library is compiled on first use: once, whole or not at all, and with a reason if it cannot be."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.kernels import build, library
from tandem.kernels import compiler as compiler_runs
from tandem.kernels.build import library_path
from tandem.kernels.compiler import BuildFailed, Stillness

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


def test_compiles_once_and_keeps_it_and_tells_its_progress(compiler: Path) -> None:
    told: list[tuple[str, float]] = []
    path = library_path(lambda what, share: told.append((what, share)))
    assert told[0][1] == 0.0
    assert re.fullmatch(r"compiling the native library, 0 of \d+ files \(\d+ s of computing\)", told[0][0])
    assert path.read_text() == "compiled\n"
    commands = compiler.read_text().splitlines()
    assert library_path() == path
    assert compiler.read_text().splitlines() == commands
    assert sum("-mamx-bf16" in command for command in commands) <= 1
    assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == []


def test_a_compilation_that_was_ended_goes_on(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = len(list(build.SOURCES.glob("*.cpp"))) + 1
    run = build.run  # type: ignore[attr-defined]

    def ended(command: Sequence[str], ending: threading.Event | None = None) -> str:
        if "-shared" in command:
            raise BuildFailed("it was ended")
        return run(command, ending)

    monkeypatch.setattr(build, "run", ended)
    with pytest.raises(BuildFailed):
        library_path()
    monkeypatch.setattr(build, "run", run)
    assert library_path().read_text() == "compiled\n"
    assert len(compiler.read_text().splitlines()) == expected, "nothing was compiled twice"


def test_processes_that_start_together_compile_once(compiler: Path) -> None:
    expected = len(list(build.SOURCES.glob("*.cpp"))) + 1

    def start() -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from tandem.kernels.build import library_path; print(library_path())"],
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


def flags_of_units(compiler: Path) -> dict[str, list[str]]:
    """The flags with which each unit was compiled."""
    found: dict[str, list[str]] = {}
    for command in compiler.read_text().splitlines():
        words = command.split()
        found.update((Path(word).name, words) for word in words if Path(word).name in build.UNIT_FLAGS)
    return found


@pytest.mark.parametrize(
    ("flags", "left_out"),
    [
        ("flags : fpu fma avx2 f16c", {"unit_avx512.cpp", "unit_avx512bf16.cpp", "unit_amx.cpp"}),
        ("flags : fma avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16", {"unit_amx.cpp"}),
        ("flags : fpu", set(build.UNIT_FLAGS)),
        ("Features : neon", set()),
    ],
)
def test_units_that_this_processor_cannot_run_are_not_compiled(
    flags: str, left_out: set[str], compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    library_path()
    compiled = flags_of_units(compiler)
    assert {unit for unit, words in compiled.items() if build.LEFT_OUT in words} == left_out
    assert "-mamx-bf16" not in compiled["unit_amx.cpp"] or "unit_amx.cpp" not in left_out


def test_a_library_for_all_processors_serves_every_one(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags : fma avx2\n")
    of_this = library_path()
    of_all = library_path(for_all=True)
    assert of_all != of_this
    assert library_path() == of_all
    assert not any(build.LEFT_OUT in line for line in compiler.read_text().splitlines()[-15:])


def test_whoever_watches_a_terminal_sees_it_compute(compiler: Path) -> None:
    """One unit takes up to a minute: a line for each file alone looks as if it stood still."""
    ours, its = pty.openpty()
    subprocess.run([sys.executable, "-m", "tandem.kernels.build"], stderr=its, timeout=60, check=True)
    seen = os.read(ours, 100_000).decode()
    assert re.search(r"0 of \d+ files \(\d+ s of computing\)\x1b\[K\r", seen)


def test_a_process_that_waits_for_another_ones_compiler_passes_its_progress_on(compiler: Path) -> None:
    _, _, expected = build.look(for_all=False)
    expected.parent.mkdir(parents=True)
    (expected.parent / build.SAID).write_text("0.5 compiling the native library, 7 of 14 files (9 s of computing)")
    told: list[tuple[str, float]] = []
    with (expected.parent / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def tell(what: str, share: float) -> None:
            told.append((what, share))
            fcntl.flock(held, fcntl.LOCK_UN)

        assert library_path(tell).exists()
    assert told[0] == ("compiling the native library, 7 of 14 files (9 s of computing)", 0.5)


def test_only_what_stands_still_is_ended_however_long_it_takes() -> None:
    now = [0.0]
    still = Stillness(lambda: now[0])
    for hour in range(10):
        now[0] = 3600.0 * hour
        assert not still.has_lasted(f"{hour} s of computing")
    now[0] += Stillness.LIMIT_S
    assert not still.has_lasted("9 s of computing")
    now[0] += 1
    assert still.has_lasted("9 s of computing")


def test_a_compiler_that_stands_still_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's own child holds the pipe open, which ends when that has ended, too."""
    script, started = tmp_path / "hangs", tmp_path / "started"
    monkeypatch.setattr(compiler_runs, "_LOOK_S", 0.01)
    # The child is seen in the look after the one that found it started.
    seen = [False]

    def has_lasted(still: Stillness, state: object) -> bool:
        before, seen[0] = seen[0], started.exists()
        return before

    monkeypatch.setattr(Stillness, "has_lasted", has_lasted)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_compiler(script, f"#!/bin/sh\nexec 3> {pipe}\nsleep 600 &\ntouch {started}\nwait\n")
    with pytest.raises(BuildFailed, match="has stood still"):
        compiler_runs.run([str(script)])
    os.set_blocking(reading, True)
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_process_tries_once(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_outcome", [])
    write_compiler(tmp_path / "fake-c++", "#!/bin/sh\necho x >> %s\nexit 1\n" % (tmp_path / "tries"))
    for _ in range(2):
        with pytest.raises(BuildFailed, match="could not compile"):
            library.load()
    assert (tmp_path / "tries").read_text() == "x\n"


def test_changed_sources_are_compiled_anew(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a;")
    (sources / "a.h").write_text("// 1")
    monkeypatch.setattr(build, "SOURCES", sources)
    first = library_path()
    (sources / "a.h").write_text("// 2")
    assert library_path() != first


def test_another_language_is_no_other_compiler(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's shell, cron and a service have different ones. Compiling takes minutes."""
    german = 'case "$LC_ALL$LANG" in *de_DE*) echo Dies ist freie Software; exit 0;; esac'
    write_compiler(tmp_path / "fake-c++", FAKE.format(log=compiler).replace("#!/bin/sh", f"#!/bin/sh\n{german}"))
    monkeypatch.setenv("LANG", "en_US.UTF-8")
    first = library_path()
    monkeypatch.setenv("LC_ALL", "de_DE.ISO-8859-1")
    assert library_path() == first


def test_what_no_locale_can_read_is_passed_on(compiler: Path, tmp_path: Path) -> None:
    write_compiler(
        tmp_path / "fake-c++", '#!/bin/sh\ncase "$*" in --version) exit 0;; esac\nprintf "no \\377 flag" >&2\nexit 1\n'
    )
    with pytest.raises(BuildFailed, match=r"no . flag"):
        library_path()


def test_a_relative_cache_folder_counts_for_nothing(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be another one in each folder that a command is typed in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert library_path().parents[1] == tmp_path / ".cache" / "tandem" / "native"


def test_what_the_compiler_says_is_passed_on(compiler: Path, tmp_path: Path) -> None:
    write_compiler(
        tmp_path / "fake-c++", '#!/bin/sh\ncase "$*" in --version) exit 0;; esac\necho "no such flag" >&2\nexit 1\n'
    )
    with pytest.raises(BuildFailed, match="no such flag"):
        library_path()
    write_compiler(tmp_path / "fake-c++", FAKE.format(log=compiler))
    assert library_path().exists(), "a failure is not remembered"


def test_a_cache_folder_that_cannot_be_written(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildFailed, match="cannot be written"):
        library_path()


def test_a_library_that_came_with_the_sources_is_taken(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = library_path(for_all=True)
    shipped = tmp_path / "compiled"
    build.ship(shipped)
    monkeypatch.setattr(build, "_SHIPPED", shipped)
    assert library_path() == made, "a compiler that CXX names is used"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert library_path().parent == shipped


def test_a_library_of_other_sources_is_left(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "compiled"
    build.ship(shipped)
    (shipped / "sources").write_text("0" * 64)
    monkeypatch.setattr(build, "_SHIPPED", shipped)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildFailed, match="there is no C"):
        library_path()
