"""Whether a model's files are whole: a download that was cut off, or that brought pointers in place of files, is said before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from tandem.base.errors import ConfigurationError
from tandem.cluster.describe import format_size
from tandem.engine.model.content import weight_files
from tandem.engine.model.source import ModelSource, find_source

_POINTER = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000  # as the safetensors library reads
# From which transformers makes a tokenizer.
_TOKENIZERS = ("tokenizer.json", "*.model", "*.model.v*", "*.spm", "*.tiktoken", "vocab*", "tekken.json")


def check_files(path: str) -> None:
    """Raises ConfigurationError if a file that serving needs is missing, cut off or unreadable."""
    source = find_source(path)
    if source.gguf_file is None:
        _check_json(source)
    files = weight_files(source)
    if not files:
        raise ConfigurationError(f"{path} has no weights: there is no .safetensors file in that folder")
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigurationError(
            f"{path} has {len(files) - len(missing)} of {len(files)} weight files; {missing[0]} is missing: fetch the others"
        )
    for file in (*files, source.folder / "tokenizer.json"):
        if file.is_file():
            _check_file(file)
    if source.gguf_file is None and not any(next(source.folder.glob(kind), None) for kind in _TOKENIZERS):
        raise ConfigurationError(f"{path} has no tokenizer: put the model's own tokenizer.json into that folder")


def _check_json(source: ModelSource) -> None:
    file = source.folder / "config.json"
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} must hold a JSON object")


def _check_file(file: Path) -> None:
    with file.open("rb") as content:
        begin = content.read(len(_POINTER))
        if begin == _POINTER:
            raise ConfigurationError(
                f"{file} is a pointer of Git LFS, and not the file: run `git lfs pull` in its folder, or fetch it another way"
            )
        if file.suffix == ".gguf" and not begin.startswith(b"GGUF"):
            raise ConfigurationError(f"{file} is no GGUF file: fetch it again")
        if file.suffix != ".safetensors":
            return
        content.seek(0)
        size = os.fstat(content.fileno()).st_size
        whole = _size_told(content, size)
    if whole is None:
        raise ConfigurationError(f"{file} is no safetensors file: fetch it again")
    if size < whole:
        raise ConfigurationError(
            f"{file} is cut off: it has {format_size(size)} of {format_size(whole)}; fetch it again"
        )


def _size_told(content: BinaryIO, size: int) -> int | None:
    """Returns how long a safetensors file is by its own header; None if it has none."""
    begin = content.read(8)
    if len(begin) < 8:
        return 8
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= _LONGEST_HEADER:
        return None
    if 8 + length > size:
        return 8 + length
    try:
        header = json.loads(content.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    except (ValueError, AttributeError, LookupError, TypeError):
        return None
