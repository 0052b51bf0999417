"""Reads a checkpoint's configuration: whether the model can be served, its dtype, its context length and its end tokens."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wing
from tandem.engine.model.peft_folder import CONFIG_FILE as ADAPTER_FILE
from tandem.engine.model.plain_config import PlainConfig, read_plain_config
from tandem.engine.model.source import ModelSource
from tandem.engine.model.tensor_files import open_tensors
from tandem.engine.model.weight_formats import config_of, weight_format

log = logging.getLogger(__name__)

CROSSED = "tandem.engine.model.crossed.capability"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SERVED_LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    # These keep a recurrent state, or the tail of a convolution. A hybrid layer also attends.
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    # Transformers' names of layers that keep nothing of a token.
    "dummy",
    "mlp",
    "moe",
}


def read_config(source: ModelSource) -> Any:
    """Reads transformers' configuration, or an equivalent plain one. Raises a ConfigurationError for a model that is known not to work,
    before any weight is read."""
    if source.gguf_file is None and (source.folder / ADAPTER_FILE).exists():
        # transformers would add it to the model where PEFT is installed, and the model's digest would not tell.
        raise ConfigurationError(
            f"{source.name} cannot be served: its folder has an adapter beside the model ({ADAPTER_FILE}), and whether it belongs to it is "
            "not known. Move it to a folder of its own, and name that in model.adapters to serve it"
        )
    plain = read_plain_config(source.read_json("config.json")) if source.gguf_file is None else None
    if plain is not None:
        return plain
    with translated_errors(source):
        if (config := config_of(source)) is None:
            # Imported here because the import takes seconds, which a plain model does not need.
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    if isinstance(config, PlainConfig):
        return config
    kind = config.model_type
    if config.is_encoder_decoder and find_wing(CROSSED) is None:
        raise _refusal(kind, "it has an encoder, and this installation has no engine/model/crossed")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    unknown = kinds - _SERVED_LAYER_TYPES
    if unknown:
        raise _refusal(
            kind,
            f"it has layers of the kind {', '.join(sorted(unknown))}, of whose tokens Tandem does not know what to keep",
        )
    if getattr(text, "index_topk", None) and not kinds & {"indexed_attention", "compressed_sparse_attention"}:
        raise _refusal(kind, "its attention picks tokens with an index of its own")
    return config


def _refusal(kind: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"a model of type {kind} cannot be served: {why}")


class translated_errors:
    """Translates whatever transformers raises for a bad checkpoint into a ConfigurationError."""

    def __init__(self, source: ModelSource) -> None:
        self._name = source.name
        self._hint = "" if source.gguf_file is None else " (from its GGUF file; its safetensors may do)"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ConfigurationError):
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            # The first line says where, and the next one what is wrong.
            why = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__
            if isinstance(error, KeyError) and len(error.args) == 1 and " " not in str(error.args[0]):
                why = f"{why} is missing, or not known"
            raise ConfigurationError(f"{self._name} cannot be loaded: {why}{self._hint}") from error


def choose_dtype(wanted: str, source: ModelSource, config: Any) -> torch.dtype:
    """The dtype to compute in. With `auto` it is the checkpoint's own."""
    if wanted == "auto":
        declared = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)

        def stored() -> torch.dtype:
            return declared if isinstance(declared, torch.dtype) else _stored_dtype(source)

        found = weight_format(source, config)
        return found.compute_dtype(stored) if found is not None else stored()
    if wanted not in _DTYPES:
        raise ConfigurationError(f"model.dtype must be auto or one of {', '.join(_DTYPES)}, not {wanted}")
    return _DTYPES[wanted]


def _stored_dtype(source: ModelSource) -> torch.dtype:
    with translated_errors(source):
        for name, file in open_tensors(source).items():
            dtype: torch.dtype = file.get_tensor(name).dtype
            if dtype.is_floating_point:
                return dtype
    return torch.float32


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"model.device must be auto, cpu, cuda or cuda:N, not {name}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"model.device must be auto, cpu, cuda or cuda:N, not {name}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"model.device is {name}, but torch finds no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigurationError(f"model.device is {name}, but the last CUDA device here is cuda:{last}")
    return device


def fp8_on(device: torch.device) -> torch.dtype:
    """The dtype of an FP8 KV cache. Raises a ConfigurationError if the device cannot convert it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigurationError(
            f"cache.dtype is fp8, which {torch.cuda.get_device_name(device)} does not compute with: it needs compute "
            "capability 8.9 or higher. Leave it at auto"
        )
    return torch.float8_e4m3fn


def eos_tokens(source: ModelSource, config: Any) -> frozenset[int]:
    """All tokens that any file of the checkpoint names as end of sequence. Some write -1 for none. Raises a ConfigurationError for
    what is no token: a request would be the first to meet it, in a step of all."""
    found: set[int] = set()
    generation = source.read_json("generation_config.json").get("eos_token_id")
    configs = (config, config.get_text_config())
    for ids in (generation, *(getattr(each, "eos_token_id", None) for each in configs)):
        if ids is None:
            continue
        named = list(ids) if isinstance(ids, list | tuple) else [ids]
        if not all(isinstance(token, int) for token in named):
            raise ConfigurationError(
                f"{source.name} cannot be served: its eos_token_id is {ids!r}, and neither a token's number nor a list of numbers"
            )
        found.update(token for token in named if token >= 0)
    return frozenset(found)
