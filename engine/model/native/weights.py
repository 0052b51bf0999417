"""From a checkpoint's matrices to the library's packed ones."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.model.native.architecture import Architecture
from tandem.kernels import library
from tandem.wire.errors import ConfigurationError, InternalError

Take = Callable[[str], torch.Tensor | None]
"""A tensor by its name in the checkpoint. It is read once, and need not stay."""

_BODY = "model."
EMBEDDING = f"{_BODY}embed_tokens.weight"
HEAD = "lm_head.weight"


def checked(status: int) -> None:
    """A call that the library refuses is a mistake of ours."""
    try:
        library.check(status)
    except library.KernelError as error:
        raise InternalError(str(error)) from error


def numbered(status: int) -> int:
    """The number of what was added to the library."""
    if status < 0:
        checked(status)
    return status


class Checkpoint:
    """A folder of safetensors files. Tensors are views of the mapped files: reading one costs no memory."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        index = folder / "model.safetensors.index.json"
        try:
            names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
            for name in sorted(names or {"model.safetensors"}):
                file: Any = safe_open(folder / name, framework="pt")
                self._files.update((key, file) for key in file.keys())  # noqa: SIM118
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigurationError(f"the weights in {folder} cannot be read: {error}") from error
        self._left = set(self._files)
        # A model that was saved without the head that chooses tokens: its tensors' names lack what stands for the model in it.
        self._is_bare = EMBEDDING not in self._files and EMBEDDING.removeprefix(_BODY) in self._files

    @property
    def holds_head(self) -> bool:
        return HEAD in self._files

    def take_embedding_for_head(self, name: str) -> torch.Tensor | None:
        return self.take(EMBEDDING if name == HEAD else name)

    def take(self, name: str) -> torch.Tensor | None:
        if self._is_bare:
            name = name.removeprefix(_BODY)
        file = self._files.get(name)
        self._left.discard(name)
        return None if file is None else file.get_tensor(name)

    @property
    def left(self) -> frozenset[str]:
        """The names that were not taken."""
        return frozenset(self._left)


def load_weights(
    model: int, architecture: Architecture, take: Take, progress: Callable[[float], None]
) -> torch.Tensor:
    """Packs everything. Returns the embedding, which the library reads where it is: it must stay alive."""
    native = library.load()
    a = architecture
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim

    def vector(which: int, layer: int, name: str, size: int) -> None:
        tensor = _required(take, name, (size,))
        checked(native.tandem_load_vector(model, which, layer, library.part(tensor)))

    def linear(which: int, layer: int, inputs: int, outputs: dict[str, int], biased: bool) -> None:
        weights = [_required(take, f"{name}.weight", (rows, inputs)) for name, rows in outputs.items()]
        biases = [_required(take, f"{name}.bias", (rows,)) for name, rows in outputs.items() if biased]
        checked(
            native.tandem_load_linear(
                model, which, layer, _parts(weights), _parts(biases) if biased else None, len(weights)
            )
        )

    for layer in range(a.layers):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        vector(library.INPUT_NORM, layer, f"{prefix}.input_layernorm.weight", a.hidden)
        vector(library.POST_NORM, layer, f"{prefix}.post_attention_layernorm.weight", a.hidden)
        if a.qk_norm:
            vector(library.Q_NORM, layer, f"{attention}.q_norm.weight", a.head_dim)
            vector(library.K_NORM, layer, f"{attention}.k_norm.weight", a.head_dim)
        parts = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        linear(library.QKV, layer, a.hidden, parts, a.qkv_bias)
        linear(library.OUTPUT, layer, queries, {f"{attention}.o_proj": a.hidden}, a.output_bias)
        parts = {f"{mlp}.gate_proj": a.intermediate, f"{mlp}.up_proj": a.intermediate}
        linear(library.GATE_UP, layer, a.hidden, parts, a.mlp_bias)
        linear(library.DOWN, layer, a.intermediate, {f"{mlp}.down_proj": a.hidden}, a.mlp_bias)
        progress((layer + 1) / (a.layers + 1))
    vector(library.FINAL_NORM, 0, "model.norm.weight", a.hidden)
    embedding = _required(take, EMBEDDING, (a.vocab, a.hidden))
    head = _head(take, a, embedding)
    checked(native.tandem_load_linear(model, library.HEAD, 0, _parts([head]), None, 1))
    checked(native.tandem_use_embedding(model, library.part(embedding)))
    progress(1.0)
    return embedding


def _head(take: Take, a: Architecture, embedding: torch.Tensor) -> torch.Tensor:
    """A checkpoint that holds a head of its own is not tied, whatever its configuration says: so transformers has it."""
    name, shape = HEAD, (a.vocab, a.hidden)
    if not a.tied:
        return _required(take, name, shape)
    own = _usable(take, name, shape)
    if own is None or (own.dtype == embedding.dtype and torch.equal(own, embedding)):
        return embedding
    return own


def _required(take: Take, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = _usable(take, name, shape)
    if tensor is None:
        raise ConfigurationError(f"the model cannot be served: its checkpoint lacks {name}")
    return tensor


def _usable(take: Take, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    tensor = take(name)
    if tensor is None:
        return None
    if tensor.shape != shape:
        raise ConfigurationError(
            f"the model cannot be served: {name} is {tuple(tensor.shape)} in its checkpoint, and {shape} by its "
            "configuration"
        )
    if tensor.dtype not in library.DTYPES:
        tensor = tensor.float()
    return tensor.contiguous()


def _parts(tensors: list[Any]) -> ctypes.Array[library.WeightRows]:
    return (library.WeightRows * len(tensors))(*map(library.part, tensors))
