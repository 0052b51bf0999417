"""Where a model's files are: a folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tandem.wire.errors import ConfigurationError

Progress = Callable[[str, float], None]
"""What is being done, and how much of it is done (0 to 1)."""

# Weights come from safetensors alone: the older format is a pickle, and opening one runs what it says.
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


# Of a model split into several GGUF files. The first stands for all of them.
_LATER_PART = re.compile(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$")


class Source(msgspec.Struct, frozen=True):
    folder: Path
    gguf_file: str | None  # its name in the folder
    name: str

    def read_json(self, file: str) -> dict[str, Any]:
        """An optional part of a checkpoint; empty when it is not there."""
        try:
            content = msgspec.json.decode((self.folder / file).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError(f"{self.folder / file} cannot be read: {error}") from error
        return content if isinstance(content, dict) else {}


def find_source(path: str, progress: Progress) -> Source:
    """Says so when a local path is not there; fetches what is named on the hub, if it is not cached."""
    if not path:
        raise ConfigurationError("no model is named: give a folder or a Hugging Face name with --model")
    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix != ".gguf":
            raise ConfigurationError(f"{path} is neither a model's folder nor a .gguf file")
        return Source(local.parent, local.name, local.stem)
    if local.is_dir():
        return _in_folder(local, path)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith("."):
        raise ConfigurationError(f"there is no model at {path}: the folder does not exist")
    return Source(_fetch(path, progress), None, path)


def _in_folder(folder: Path, path: str) -> Source:
    name = folder.resolve().name
    if (folder / "config.json").is_file():
        return Source(folder, None, name)
    names = sorted(file.name for file in folder.glob("*.gguf"))
    files = [name for name in names if not _LATER_PART.search(name)]
    if len(files) == 1:
        return Source(folder, files[0], name)
    if files:
        raise ConfigurationError(f"{path} holds several .gguf files: name one of {', '.join(files)}")
    raise ConfigurationError(f"{path} holds no model: there is neither a config.json nor a .gguf file in it")


def _fetch(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    class Reported(tqdm):  # type: ignore[misc]
        """Counts files and bytes on our progress, not on the terminal."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self._so_far = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            self._so_far += n or 0
            if self.total:
                progress(f"fetching {name}", min(1.0, self._so_far / self.total))
            return None

    progress(f"fetching {name}", 0.0)
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, tqdm_class=Reported))
    except Exception as error:  # the hub's client and what it calls raise nearly everything
        why = str(error).strip().splitlines()
        raise ConfigurationError(
            f"{name} cannot be fetched from the Hugging Face hub: {why[0] if why else type(error).__name__}"
        ) from error
