"""The image of manifests/kuberay/Dockerfile, built as it stands and served from: `make test-image`. Needs root, Debian's buildah and debootstrap,
12 GB of disk and some minutes.

Ray's own image cannot be had everywhere, so a stand-in takes its place: Debian with Python, a user of the same number, and Ray in an
environment of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.integration.cluster_lab import free_port

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("buildah", "debootstrap")
BUILD_S, START_S = 1500.0, 300.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * BUILD_S),
    pytest.mark.skipif("TANDEM_TEST_IMAGE" not in os.environ, reason="builds an image: make test-image"),
]


class Builder:
    """buildah, with a store that goes with the test."""

    def __init__(self, folder: Path) -> None:
        self._options = ["--root", str(folder / "store"), "--runroot", str(folder / "run")]
        self._environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
        # Packages that lie in folders of this machine must be found from within, too.
        self.mounts = [word for folder in pip_folders() for word in ("-v", f"{folder}:{folder}:ro")]

    def begin(self, action: str, *words: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["buildah", *self._options, action, *map(str, words)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(self, action: str, *words: str | Path) -> str:
        process = self.begin(action, *words)
        try:
            said, _ = process.communicate(timeout=BUILD_S)
        finally:
            end(process)
        assert process.returncode == 0, said[-4000:]
        return said.strip()


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def pip_settings() -> dict[str, str]:
    """What says where packages come from, also what the environment says: `PIP_FIND_LINKS` is `find-links`."""
    lines = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    found = dict(re.findall(r"^(?:global|user|site|:env:)\.([\w-]+)='(.*)'$", "\n".join(lines), re.MULTILINE))
    return {name: found[name] for name in ("index-url", "extra-index-url", "find-links", "cert") if name in found}


def pip_folders() -> Sequence[str]:
    words = " ".join(value for name, value in pip_settings().items() if name != "cert").split()
    places = [Path(word.removeprefix("file://")) for word in words]
    return sorted({f"/{place.parts[1]}" for place in places if place.is_absolute() and place.exists()})


def mirror() -> str:
    """Where this machine has its own packages from."""
    found = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Codename: bookworm"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout.split()  # fmt: skip
    assert found, "apt-get knows no mirror of Debian: apt-get update"
    return found[0]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    assert not missing, f"{' and '.join(missing)}: apt-get install {' '.join(NEEDED)}"
    assert os.geteuid() == 0, "debootstrap and buildah's chroot isolation need root"
    folder = tmp_path_factory.mktemp("image")
    yield Builder(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def base(builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> str:
    system = tmp_path_factory.mktemp("debian")
    subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", system, mirror()],
        stdout=subprocess.DEVNULL, timeout=BUILD_S, check=True,
    )  # fmt: skip
    for file in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(file).is_file():
            shutil.copyfile(file, system / file.lstrip("/"))
    settings = "".join(f"{name} = {value}\n" for name, value in pip_settings().items())
    (system / "etc/pip.conf").write_text(f"[global]\n{settings}")
    subprocess.run(["chroot", system, "useradd", "-m", "-u", "1000", "ray"], timeout=60, check=True)
    container = builder("from", "scratch").splitlines()[-1]
    builder("copy", "-q", container, system, "/")
    shutil.rmtree(system)
    builder("config", "--user", "1000", "--workingdir", "/home/ray", "--env", "HOME=/home/ray", container)
    builder("config", "--env", "PATH=/home/ray/venv/bin:/usr/local/bin:/usr/bin:/bin", container)
    builder("run", "--user", "0", container, "--", "chown", "-R", "1000", "/home/ray")
    ray = re.search(r'"(ray\[default\][^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert ray is not None
    install = f"python3 -m venv /home/ray/venv && pip install -q '{ray[1]}'"
    builder("run", *builder.mounts, container, "--", "sh", "-c", install)
    builder("commit", "-q", "--rm", container, "stand-in:latest")
    return "localhost/stand-in:latest"


def test_the_image_is_built_from_the_dockerfile_and_answers(builder: Builder, base: str, tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in tracked:
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)
    subprocess.run(
        ["python3", "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", "."],
        cwd=tmp_path,
        env={**os.environ, "TANDEM_KERNELS": "0"},
        timeout=BUILD_S,
        check=True,
    )
    builder(
        "bud", *builder.mounts, "-f", tmp_path / "manifests/kuberay/Dockerfile",
        "--build-arg", f"BASE={base}", "--build-arg", "TORCH_INDEX=", "-t", "tandem-serve:latest", tmp_path,
    )  # fmt: skip
    container = builder("from", "localhost/tandem-serve:latest").splitlines()[-1]
    port = free_port()
    serving = builder.begin(
        "run", *builder.mounts, container, "--",
        "tandem", "serve", "--port", str(port), "--aggregated", "1", "--kv-memory", "256MiB",
    )  # fmt: skip
    try:
        assert serving.stdout is not None
        said = []
        for line in serving.stdout:
            said.append(line)
            if line.startswith("stop:"):
                break
        assert said, "it ended at once"
        assert said[-1].startswith("stop:"), "".join(said)
        body = {
            "model": "SmolLM2-135M-Instruct",
            "prompt": "The capital of France is",
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=START_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert "Paris" in answer.json()["choices"][0]["text"]
    finally:
        end(serving)
