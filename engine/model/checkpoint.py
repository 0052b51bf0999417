"""From a folder, a hub name or a GGUF file to a transformers model whose attention is ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.config import ModelConfig
from engine.model.attention.interface import PAGED
from wire.errors import ConfigurationError

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

_DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Source(msgspec.Struct, frozen=True):
    """Where a checkpoint is: what transformers is to open, and the GGUF file in it, if it is one."""

    location: str
    gguf_file: str | None
    name: str


def find_source(path: str) -> Source:
    """A folder, a .gguf file, a folder with one of them, or a hub name. Says so when a local path is not there."""
    if not path:
        raise ConfigurationError("no model is named: give a folder or a Hugging Face name with --model")
    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix != ".gguf":
            raise ConfigurationError(f"{path} is neither a model's folder nor a .gguf file")
        return Source(str(local.parent), local.name, local.stem)
    if local.is_dir():
        name = local.resolve().name
        if (local / "config.json").is_file():
            return Source(str(local), None, name)
        files = sorted(file.name for file in local.glob("*.gguf"))
        if len(files) == 1:
            return Source(str(local), files[0], name)
        if files:
            raise ConfigurationError(f"{path} holds several .gguf files: name one of {', '.join(files)}")
        raise ConfigurationError(
            f"{path} holds no model: there is neither a config.json nor a .gguf file in it"
        )
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigurationError(f"there is no model at {path}: the folder does not exist")
    return Source(path, None, path)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"model.device must be auto, cpu, cuda or cuda:N, not {name}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"model.device is {name}, but torch finds no CUDA device here")
    return device


def load_model(
    source: Source, config: ModelConfig, device: torch.device, progress: Progress
) -> PreTrainedModel:
    """Weights are read through the page cache, one shard at a time, straight into place."""
    if config.dtype not in _DTYPES:
        raise ConfigurationError(f"model.dtype must be one of {', '.join(_DTYPES)}, not {config.dtype}")
    options: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        model_config = AutoConfig.from_pretrained(source.location, **options)
        _refuse_by_config(model_config)
        if source.gguf_file:
            options["quantization_config"] = GgufConfig(dequantize=True)
        with _reported(progress):
            model, report = AutoModelForCausalLM.from_pretrained(
                source.location,
                dtype=_DTYPES[config.dtype],
                attn_implementation=PAGED,
                device_map={"": str(device)} if device.type != "cpu" else None,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except ConfigurationError:
        raise
    except Exception as error:  # transformers and what it calls raise nearly everything for a bad checkpoint
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(f"{source.name} cannot be loaded: {first_line}") from error
    absent = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if absent:
        some = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        raise ConfigurationError(f"{source.name} cannot be served: its checkpoint lacks {some}")
    model.eval()
    model.requires_grad_(False)
    return model


def _refuse_by_config(config: Any) -> None:
    """What is known not to work before any weight is read."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ConfigurationError(
            f"a model of type {kind} cannot be served: it is an encoder-decoder, and only decoders are served"
        )
    text = config.get_text_config()
    if getattr(text, "num_kv_shared_layers", 0):
        raise ConfigurationError(
            f"a model of type {kind} cannot be served: some of its layers read the KV cache of another layer"
        )
    for types in [set(getattr(text, "layer_types", None) or ())]:
        unknown = types - {"full_attention", "sliding_attention"}
        if unknown:
            raise ConfigurationError(
                f"a model of type {kind} cannot be served: it has layers of the kind {', '.join(sorted(unknown))}, "
                "whose state is not a paged KV cache"
            )
    if getattr(text, "index_topk", None):
        raise ConfigurationError(
            f"a model of type {kind} cannot be served: its attention picks tokens with an index of its own"
        )


def context_length(config: Any, wanted: int | None) -> int:
    """What the model was trained for, or less if less is wanted."""
    text = config.get_text_config()
    trained = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    # Gemma 3 and its like give the parameters for each kind of layer.
    variants = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for variant in variants:
        if variant.get("rope_type") in ("dynamic", "longrope"):
            # These frequencies depend on the longest sequence of a batch, beyond the original length; one request
            # would change another's answer. Up to it they are constant.
            original = variant.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            if original and trained and original < trained:
                log.warning(
                    "%s: rotary embedding of type %s: requests are limited to its original %d tokens",
                    config.model_type,
                    variant["rope_type"],
                    original,
                )
                trained = original
    if trained is None:
        if wanted is None:
            raise ConfigurationError("the model does not say how long its context is: set --max-model-len")
        return wanted
    if wanted is not None and wanted > trained:
        log.warning("max_model_len is %d: the model was not trained for %d", trained, wanted)
    return min(int(trained), wanted or int(trained))


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    found: set[int] = set()
    for holder in (model.generation_config, model.config, model.config.get_text_config()):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)


@contextmanager
def _reported(progress: Progress) -> Iterator[None]:
    """Transformers counts weights as it loads them; pass that on, and keep its bar off the terminal."""

    class Bar:
        def __init__(self, items: Any = None, *, total: int | None = None, **_: Any) -> None:
            self._items = items
            self._total = total or (len(items) if hasattr(items, "__len__") else 0)
            self._done = 0

        def __iter__(self) -> Iterator[Any]:
            for item in self._items:
                yield item
                self.update()

        def update(self, count: int = 1) -> None:
            self._done += count
            if self._total:
                progress("loading weights", min(1.0, self._done / self._total))

        def __getattr__(self, _: str) -> Any:
            return lambda *args, **kwargs: None

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    previous = transformers_logging.set_tqdm_hook(lambda _factory, args, kwargs: Bar(*args, **kwargs))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
