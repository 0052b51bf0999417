"""A model's identity: the digest of its content. A name does not identify a model, because its files may change on the hub, and
folders on two machines may differ. Two nodes work on one request only if their models' contents are equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.engine.model.source import ModelSource
from tandem.machine.digests import OnRead, digest_of, digests_of
from tandem.wire.images import image_rules, processor_settings

# Increase it when the same weights and tokens give other bytes in a KV block than before.
KV_VERSION = 1
# The same of quantized matrices: the native library computes with them as they are. Before, it widened them to bfloat16 first.
QUANTIZED_KV_VERSION = 2

BLOCKS_FILE = "tandem-blocks"
"""Beside a checkpoint that was made of a GGUF file: the same matrices in blocks, by their names in the checkpoint. It is a safetensors
file under a name that other programs do not take for weights."""

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Keys of a configuration that change nothing in the model.
_SAYS_NOTHING = ("transformers_version", "_name_or_path")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]  # the file of each tensor


class ModelContent(msgspec.Struct, frozen=True):
    digest: str
    tokenizer: str  # the digest of tokenizer.json only; "" when the model has none


def content_of(source: ModelSource, on_read: OnRead = lambda num_bytes: None) -> ModelContent:
    """Hashes the model's files. Reads every byte of the weights the first time, and is quick after that. Raises a ConfigurationError."""
    settings = processor_settings(source.read_json) if source.gguf_file is None else {}
    try:
        tokenizer = _digest(source.folder / "tokenizer.json")
        parts = {
            "kv": QUANTIZED_KV_VERSION if _is_quantized(source) else KV_VERSION,
            "config": _meaning(source, "config.json") if source.gguf_file is None else {},
            "generation": _meaning(source, "generation_config.json"),
            "tokenizer": tokenizer or _digest(source.folder / "tokenizer.model"),
            # File names are left out: they only say how the weights are split.
            "weights": sorted(digests_of([*weight_files(source), *_blocks(source)], on_read)),
        }
        if source.gguf_file is None and image_rules(source.read_json("config.json"), settings) is not None:
            parts["images"] = settings  # other pixels make other KV
    except OSError as error:
        raise ConfigurationError(f"{source.name} cannot be read: {error}") from error
    return ModelContent(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(), tokenizer)


def weight_files(source: ModelSource) -> list[Path]:
    """The weight files that are loaded. Hashing them covers the tensors' names, types and shapes, with which each file begins."""
    folder = source.folder
    if source.gguf_file is not None:
        found = _PART.search(source.gguf_file)
        if found is None:
            return [folder / source.gguf_file]
        return sorted(folder.glob(f"{source.gguf_file[: found.start()]}-*-of-{found[1]}.gguf"))
    if named := _indexed(folder / INDEX):
        return [folder / name for name in sorted(named)]
    only = folder / WHOLE
    return [only] if only.is_file() else sorted(folder.glob("*.safetensors"))


def _indexed(file: Path) -> set[str]:
    """The files that an index names. Raises a ConfigurationError for one elsewhere: who wrote the index does not choose what is read here."""
    try:
        named = set(msgspec.json.decode(file.read_bytes(), type=_Index).weight_map.values())
    except FileNotFoundError:
        return set()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    for name in named:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigurationError(f"{file} names {name[:200]}, which is not in its folder: fetch the model again")
    return named


def _is_quantized(source: ModelSource) -> bool:
    return source.gguf_file is not None or "quantization_config" in source.read_json("config.json")


def _blocks(source: ModelSource) -> list[Path]:
    """Not every processor computes with blocks what it computes with the checkpoint's weights, bit for bit."""
    file = source.folder / BLOCKS_FILE
    return [file] if source.gguf_file is None and file.is_file() else []


def _digest(file: Path) -> str:
    return digest_of(file) if file.is_file() else ""


def _meaning(source: ModelSource, file: str) -> dict[str, Any]:
    return {key: value for key, value in source.read_json(file).items() if key not in _SAYS_NOTHING}
