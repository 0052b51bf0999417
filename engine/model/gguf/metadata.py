"""Reads the metadata of GGUF files that transformers ignores. Transformers reads the weights and the model's sizes, but not what
changes rotary embeddings, nor the other files of a split model; answers would be silently wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.gguf.header import GgufHeader
from tandem.engine.model.leftovers import is_draft_layer, layer_of, num_layers, refuse_leftovers
from tandem.engine.model.plain_config import PlainConfig
from tandem.engine.model.source import ModelSource

FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

# The kinds of rotary scaling: the keys that a file must have for each, and those that it may have.
_STRETCHES = {
    "linear": ({"factor"}, {"original_context_length"}),
    "yarn": ({"factor", "original_context_length"}, {"yarn_beta_fast", "yarn_beta_slow"}),
    "longrope": ({"original_context_length"}, {"attn_factor"}),
}
_NAMES = {  # transformers' names of these keys
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# llama.cpp recognizes Gemma's 27B models by their number of layers, and scales their attention differently.
_GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}


class Metadata:
    """The metadata of one file. Keys are given without their architecture prefix."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._header = GgufHeader(source.folder / str(source.gguf_file))
        self._prefix = f"{self.general('general.architecture')}."

    def general(self, key: str) -> Any:
        return self._header.values.get(key)

    def get(self, key: str) -> Any:
        return self.general(self._prefix + key)

    def below(self, key: str) -> dict[str, Any]:
        """All values whose keys begin with this one, by the rest of the key; with "" all of the architecture."""
        start = f"{self._prefix}{key}." if key else self._prefix
        return {
            name.removeprefix(start): value for name, value in self._header.values.items() if name.startswith(start)
        }

    @property
    def tensors(self) -> dict[str, Any]:
        return dict(self._header.tensors)


def loading_options(source: ModelSource, config: Any) -> dict[str, Any]:
    """Options for `from_pretrained`. The configuration is among them, because transformers would otherwise read it again from the
    file."""
    from transformers import GgufConfig

    return {
        "config": whole_config(source) if isinstance(config, PlainConfig) else config,
        "gguf_file": source.gguf_file,
        "quantization_config": GgufConfig(dequantize=True),
    }


def whole_config(source: ModelSource) -> Any:
    """transformers' configuration."""
    # Imported here because few files need it, and it takes seconds.
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False, gguf_file=source.gguf_file)
    complete_config(Metadata(source), config)
    return config


def refuse_parts(metadata: Metadata) -> None:
    source, count = metadata.source, metadata.general("split.count") or 1
    if count > 1:
        raise ConfigurationError(
            f"{source.name} cannot be served: {source.gguf_file} is one of {count} files of a split model. Join them "
            "(llama-gguf-split --merge FIRST-FILE WHOLE-FILE) and name the whole file, or the folder of the same "
            "model's safetensors"
        )
    if metadata.general("general.architecture") is None:
        raise ConfigurationError(f"{source.name} cannot be served: its file names no architecture")


def refuse_uneven_heads(metadata: Metadata) -> None:
    """Who reads queries and keys puts their rows in another order, head by head and in pairs."""
    for part, key in ((".attn_q.", "attention.head_count"), (".attn_k.", "attention.head_count_kv")):
        heads = metadata.get(key)
        for name, tensor in metadata.tensors.items():
            if part in name and isinstance(heads, int) and heads > 0 and tensor.shape[-1] % (2 * heads):
                raise ConfigurationError(
                    f"{metadata.source.name} cannot be served: {name} has {tensor.shape[-1]} rows, which are no whole "
                    f"pairs for each of {heads} heads"
                )


def complete_config(metadata: Metadata, config: Any) -> None:
    """Adds to the configuration what the file says about the computation and transformers did not read."""
    if getattr(config, "rope_parameters", None):
        _complete_rotary(metadata, config)
    if config.model_type == "phi3":
        config.sliding_window = metadata.get("attention.sliding_window") or None
    if config.model_type in _GEMMA_27B:
        is_27b = config.num_hidden_layers == _GEMMA_27B[config.model_type]
        per_head = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = per_head if is_27b else config.head_dim


def _complete_rotary(metadata: Metadata, config: Any) -> None:
    rope: dict[str, Any] = config.rope_parameters
    # If layers differ in kind, only those with full attention are scaled.
    kinds = [kind for kind in ("full_attention", "sliding_attention") if isinstance(rope.get(kind), dict)]
    full = rope["full_attention"] if kinds else rope
    if (base := metadata.get("rope.freq_base")) is not None:
        full["rope_theta"] = float(base)
    if "sliding_attention" in kinds and (base := metadata.get("rope.freq_base_swa")) is not None:
        rope["sliding_attention"]["rope_theta"] = float(base)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = metadata.get("rope.dimension_count")
    if turned and not kinds and turned != int(head * full.get("partial_rotary_factor", 1.0)):
        full["partial_rotary_factor"] = turned / head
    full.update(_stretching(metadata))
    if "original_max_position_embeddings" in full and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = full["original_max_position_embeddings"]


def _stretching(metadata: Metadata) -> dict[str, Any]:
    said, tensors = metadata.below("rope.scaling"), metadata.tensors
    said.pop("finetuned", None)
    if (older := metadata.get("rope.scale_linear")) is not None:
        said.setdefault("factor", older)
    # A file with only a factor means linear scaling, the first kind that there was.
    kind = said.pop("type", None) or ("linear" if said.get("factor") else "none")
    if _LONG_FACTORS in tensors or _SHORT_FACTORS in tensors:
        kind = "longrope"
    if kind == "none" or (kind == "linear" and said.get("factor", 0) in (0, 1)):
        return {}
    if kind not in _STRETCHES:
        raise _not_read(metadata, kind)
    needed, known = _STRETCHES[kind]
    if missing := needed - said.keys():
        raise _not_read(metadata, f"{kind} without {', '.join(sorted(missing))}")
    if unknown := said.keys() - needed - known:
        raise _not_read(metadata, f"{kind} with {', '.join(sorted(unknown))}")
    stretching = {_NAMES[key]: value for key, value in said.items()}
    if kind == "longrope":
        for key, tensor in (("long_factor", _LONG_FACTORS), ("short_factor", _SHORT_FACTORS)):
            if tensor not in tensors:
                raise _not_read(metadata, f"{kind} without {tensor}")
            stretching[key] = tensors[tensor].data.tolist()
    return {"rope_type": kind, **stretching}


def _not_read(metadata: Metadata, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{metadata.source.name} cannot be served: its rotary embedding is stretched in a way that is not read from GGUF "
        f"files ({what}): serve the same model from its safetensors"
    )


def finish_loading(source: ModelSource, model: torch.nn.Module) -> None:
    """Applies the rotary frequencies' factors, and refuses a file with tensors that transformers ignored."""
    tensors = Metadata(source).tensors
    if (factors := tensors.get(FACTORS)) is not None and (factors.data != 1.0).any():
        _divide_frequencies(source, model, torch.tensor(factors.data))
    # Tied tensors have one place.
    taken = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    refuse_rest(source.name, places(tensors), sum(taken.values()), model.config)


def _divide_frequencies(source: ModelSource, model: torch.nn.Module, factors: torch.Tensor) -> None:
    """Applies Llama 3's rotary scaling: the file has a divisor for each frequency."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    frequencies = [buffer for buffer in buffers if buffer.shape == factors.shape]
    rotaries = sum(hasattr(module, "inv_freq") for module in model.modules())
    if rotaries != 1 or len(frequencies) != len(buffers):
        raise misfit(source.name)
    for buffer in frequencies:
        buffer.div_(factors.to(buffer))


def misfit(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} cannot be served: {FACTORS} does not fit its rotary embedding: serve the same model from its safetensors"
    )


def places(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors that need a place in the model. The others changed its rotary embedding."""
    return {name: tensor for name, tensor in tensors.items() if name not in (FACTORS, _LONG_FACTORS, _SHORT_FACTORS)}


def refuse_rest(name: str, tensors: dict[str, Any], taken: int, config: Any) -> None:
    """Refuses a file with more weights than the model took. File and model name tensors differently, so compare how many numbers they hold:
    every number of the file must have a place in the model."""
    layers = num_layers(config)
    refuse_leftovers(name, (tensor for tensor in tensors if (layer_of(tensor) or 0) >= layers), config)
    held = sum(int(tensor.n_elements) for key, tensor in tensors.items() if not is_draft_layer(key, config))
    if held > taken:
        raise ConfigurationError(
            f"{name} cannot be served: its file holds {held:,} weights, and only {taken:,} of them have a place in a model "
            "of its kind: take a file whose metadata belong to its tensors, or the model's safetensors"
        )
