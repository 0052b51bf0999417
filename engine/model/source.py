"""Where a model's files are: a folder, or a GGUF file in one. The cluster has already turned a model's name into a path."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share that is done (0 to 1)."""

# A later file of a model that is split into several GGUF files. The first file names the model.
_LATER_PART = re.compile(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$")


class ModelSource(msgspec.Struct, frozen=True):
    folder: Path
    gguf_file: str | None  # the file's name in the folder; None: not a GGUF model
    name: str

    def read_json(self, file: str) -> dict[str, Any]:
        """Reads an optional JSON file of a checkpoint; returns an empty dict if there is none."""
        try:
            content = msgspec.json.decode((self.folder / file).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError(f"{self.folder / file} cannot be read: {error}") from error
        return content if isinstance(content, dict) else {}


def find_source(path: str) -> ModelSource:
    """Finds the model at `path`. Raises a ConfigurationError if there is none."""
    if not path:
        raise ConfigurationError("no model is named: give a folder or a Hugging Face name with --model")
    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix != ".gguf":
            raise ConfigurationError(f"{path} is neither a model's folder nor a .gguf file")
        return ModelSource(local.parent, local.name, local.stem)
    if local.is_dir():
        return _in_folder(local, path)
    raise ConfigurationError(f"there is no model at {path}: the folder does not exist")


def _in_folder(folder: Path, path: str) -> ModelSource:
    name = folder.resolve().name
    if (folder / "config.json").is_file():
        return ModelSource(folder, None, name)
    names = sorted(file.name for file in folder.glob("*.gguf"))
    files = [name for name in names if not _LATER_PART.search(name)]
    if len(files) == 1:
        return ModelSource(folder, files[0], name)
    if files:
        raise ConfigurationError(f"{path} holds several .gguf files: name one of {', '.join(files)}")
    raise ConfigurationError(f"{path} holds no model: there is neither a config.json nor a .gguf file in it")


def tokenizer_json(source: ModelSource) -> str:
    """The tokenizer as one JSON document, converted if the checkpoint has it in another form."""
    file = source.folder / "tokenizer.json"
    try:
        if source.gguf_file is None and file.is_file():
            return file.read_text(encoding="utf-8")
        from transformers import AutoTokenizer

        options = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        backend = AutoTokenizer.from_pretrained(
            str(source.folder), trust_remote_code=False, **options
        ).backend_tokenizer
        text: str = backend.to_str()
        return text
    except Exception as error:  # transformers raises nearly everything for a tokenizer that it cannot convert
        raise ConfigurationError(f"{source.name} has no tokenizer that grammars can follow: {error}") from error
