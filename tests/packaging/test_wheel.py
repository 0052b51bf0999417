"""The wheel as a user has it: installed by one `pip install` into an environment of its own, beside distributions that are
called as our packages are, and used from a folder whose modules bear our packages' names.

The dependencies are those of this environment: a link stands for installing them again, which takes minutes.
`TANDEM_FULL_INSTALL=1` installs them as well, with pip alone, from wherever it is configured to fetch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import pytest

from tandem.cluster.models.store import prepare_model

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = sorted({path.parent.name for path in ROOT.glob("*/py.typed")} - {"tandem"})
# What a user may have in the folder where a command is typed, or installed: each ends the process that imports it.
FULL = os.environ.get("TANDEM_FULL_INSTALL") == "1"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 if FULL else 300)]
START_S = 120.0
TRAP = "raise SystemExit(f'{__name__} was imported from {__file__}')\n"


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=1500 if FULL else 250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, kernels: str) -> Path:
    """Builds from a copy, so that nothing is left in the tree."""
    source = folder / "source" / "tandem-serve"
    tracked = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in tracked:
        file = ROOT / name
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink():
            target.symlink_to(file.readlink())
        elif file.is_file() and not name.startswith("tests/"):
            target.write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder / "dist", source, TANDEM_KERNELS=kernels)
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "1" if FULL else "0")


@pytest.fixture(scope="module")
def compiled_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With kernels for processors of all kinds, which take two minutes of computing."""
    return build(tmp_path_factory.mktemp("wheel"), "1")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    run(*pip, "install", *([] if FULL else ["--no-deps"]), wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    if not FULL:
        # A path that is added so is searched last, and its own .pth files, such as an editable Tandem's, are not read.
        here = next(path for path in sys.path if path.endswith("site-packages"))
        (packages / "dependencies.pth").write_text(here + "\n")
    for name in ("engine", "router", "node"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(TRAP)
    return folder


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A user's folder."""
    for name in (*PACKAGES, "tandem", "msgspec"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    return tmp_path


def test_nothing_but_one_name_is_installed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = PROJECT["version"]
    assert {name.partition("/")[0] for name in names} == {"tandem", f"tandem_serve-{version}.dist-info"}
    assert {name.split("/")[1] for name in names if name.count("/") > 1} >= set(PACKAGES)
    for file in ("LICENSE", "NOTICE"):
        assert f"tandem_serve-{version}.dist-info/licenses/{file}" in names
    assert {"tandem/manifests/ray/static.yaml", "tandem/simulator/example.json"} <= set(names)


@pytest.mark.more
def test_a_wheel_with_kernels_is_for_any_python_on_this_platform(compiled_wheel: Path) -> None:
    assert re.fullmatch(r"tandem_serve-[\w.]+-py3-none-linux_\w+\.whl", compiled_wheel.name)


# The newest of each that manylinux_2_28 promises.
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}


@pytest.mark.more
def test_the_library_asks_for_nothing_newer_than_manylinux_has(compiled_wheel: Path, tmp_path: Path) -> None:
    """A wheel that is built on a newer system still loads on one with glibc 2.28."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) reads what a library asks for")
    with zipfile.ZipFile(compiled_wheel) as archive:
        library = archive.extract("tandem/kernels/compiled/libtandem_native.so", tmp_path)
    needs = run("readelf", "--version-info", "--wide", library).partition("Version needs section")[2]
    asked = set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", needs))
    assert {kind for kind, _ in asked} >= {"GLIBC", "GLIBCXX"}
    for kind, version in asked:
        assert tuple(map(int, version.split("."))) <= MANYLINUX_2_28[kind], f"{kind}_{version}"


@pytest.mark.more
def test_the_kernels_come_compiled(compiled_wheel: Path, tmp_path: Path) -> None:
    """There is no compiler on the path, and no cache."""
    with zipfile.ZipFile(compiled_wheel) as archive:
        archive.extractall(tmp_path / "installed")
    script = "from tandem.kernels.build import library_path; print(library_path())"
    there = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path), "CXX": "", "PYTHONPATH": str(tmp_path / "installed")}
    said = run(sys.executable, "-P", "-c", script, cwd=tmp_path, **there)
    assert Path(said.strip()).parent == tmp_path / "installed" / "tandem" / "kernels" / "compiled"


def test_the_command_runs_in_a_folder_with_modules_of_our_names(environment: Path, trapped: Path) -> None:
    tandem = environment / "bin" / "tandem"
    assert run(tandem, "--version", cwd=trapped).startswith(f"tandem {PROJECT['version']} ")
    run(tandem, "config", cwd=trapped)
    assert json.loads(run(tandem, "init", "new", "--cluster", "static", "-o", "json", cwd=trapped))


def test_every_module_can_be_imported_there(environment: Path, trapped: Path) -> None:
    script = """
import importlib, pkgutil, tandem
names = [m.name for m in pkgutil.walk_packages(tandem.__path__, "tandem.") if not m.name.endswith("__main__")]
left = {"matplotlib", "flashinfer", "opentelemetry", "vllm"}  # extras, and an engine with an environment of its own
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in left:
            raise
print(len(names))
"""
    assert int(run(environment / "bin" / "python", "-P", "-c", script, cwd=trapped, RAY_AUTH_MODE="token")) > 100


def test_it_serves_from_a_folder_with_modules_of_our_names(environment: Path, trapped: Path) -> None:
    prepare_model("smollm2", lambda what, fraction: None)
    with serving(environment / "bin" / "tandem", trapped) as url:
        question = {
            "model": "SmolLM2-135M-Instruct",
            "prompt": "The capital of France is",
            "max_tokens": 4,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=question, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4


@contextmanager
def serving(tandem: Path, folder: Path) -> Iterator[str]:
    """`tandem serve` from when it answers; it must end well."""
    command = [tandem, "serve", "smollm2", "--port", "0", "--kv-memory", "256MiB"]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    alarm = threading.Timer(START_S, process.terminate)
    alarm.start()
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.match(r"API: +(http\S+)/v1", line):
                break
        else:
            pytest.fail(f"it did not come up:\n{said}")
        alarm.cancel()
        yield found[1]
    finally:
        alarm.cancel()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=90)
    assert process.returncode == 0, said


def test_every_direct_import_is_declared() -> None:
    """What comes with another dependency today may not tomorrow."""
    declared = {re.split(r"[^\w-]", line)[0].lower().replace("_", "-") for line in _requirements()}
    distributions = packages_distributions()
    undeclared = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"^\s*(?:import|from) (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
                if name in distributions and name != "tandem":
                    owners = {owner.lower().replace("_", "-") for owner in distributions[name]}
                    if not owners & declared:
                        undeclared.add((name, file.relative_to(ROOT).as_posix()))
    assert not undeclared


def _requirements() -> Iterator[str]:
    yield from PROJECT["dependencies"]
    for extra in PROJECT["optional-dependencies"].values():
        yield from extra
