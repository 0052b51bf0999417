"""The native forward pass (engine.model.runner.Forward): packs a Llama-like model's matrices once, and computes batches in the library."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.base.errors import ConfigurationError, InternalError
from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.model.leftovers import refuse_leftovers
from tandem.engine.model.native.architecture import Architecture, describe, head_size, refusal, rope_parameters
from tandem.engine.model.native.blocks import StoredBlocks
from tandem.engine.model.runner import Batch, LayerHooks
from tandem.engine.model.source import ModelSource
from tandem.engine.model.tensor_files import open_tensors
from tandem.kernels import library
from tandem.kernels.compiler import BuildFailed
from tandem.kernels.library import BlockRows, Weights

Take = Callable[[str], Weights | None]
"""Returns weights by their name in the checkpoint; None if there are none. They are read once, and may be freed afterwards."""

_BODY = "model."
EMBEDDING = f"{_BODY}embed_tokens.weight"
HEAD = "lm_head.weight"


def checked(status: int) -> None:
    """Raises an InternalError if the library refused a call, which is a bug here."""
    if status != 0:
        raise InternalError(f"native model: {library.last_error()}")


def numbered(status: int) -> int:
    """The number that the library gave to something added; raises like `checked`."""
    if status < 0:
        checked(status)
    return status


class Checkpoint:
    """A folder of safetensors files. Tensors are views of the mapped files, so reading one takes no memory. Matrices of `dtype` that lie
    beside them in blocks are taken in blocks."""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self._dtype, self._blocks = dtype, StoredBlocks(folder)
        self._files = open_tensors(ModelSource(folder, None, folder.resolve().name))
        self._left = set(self._files)
        # A model that was saved without its head has tensors without the prefix that stands for the model in a whole one.
        self._is_bare = EMBEDDING not in self._files and EMBEDDING.removeprefix(_BODY) in self._files

    @property
    def holds_head(self) -> bool:
        return HEAD in self._files

    def take_embedding_for_head(self, name: str) -> Weights | None:
        return self.take(EMBEDDING if name == HEAD else name)

    def take(self, name: str) -> Weights | None:
        if self._is_bare:
            name = name.removeprefix(_BODY)
        file = self._files.get(name)
        self._left.discard(name)
        if file is None:
            return None
        tensor: torch.Tensor = file.get_tensor(name)
        blocks = self._blocks.of(name, tensor) if tensor.dtype == self._dtype else None
        return tensor if blocks is None else blocks

    @property
    def left(self) -> frozenset[str]:
        """The names of tensors that were not taken."""
        return frozenset(self._left)


def load_weights(model: int, architecture: Architecture, take: Take, progress: Callable[[float], None]) -> Weights:
    """Packs all weights. Returns the embedding, which the library reads in place: the caller must keep it alive."""
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


def _head(take: Take, a: Architecture, embedding: Weights) -> Weights:
    """The head's matrix. As in transformers, a checkpoint with its own head is not tied, whatever its configuration says."""
    name, shape = HEAD, (a.vocab, a.hidden)
    if not a.tied:
        return _required(take, name, shape)
    own = _usable(take, name, shape)
    return embedding if own is None or _are_the_same(own, embedding) else own


def _are_the_same(one: Weights, other: Weights) -> bool:
    if isinstance(one, BlockRows) and isinstance(other, BlockRows):
        return one.kind == other.kind and np.array_equal(one.data, other.data)
    if isinstance(one, BlockRows) or isinstance(other, BlockRows):
        return False
    return one.dtype == other.dtype and torch.equal(one, other)


def _required(take: Take, name: str, shape: tuple[int, ...]) -> Weights:
    weights = _usable(take, name, shape)
    if weights is None:
        raise ConfigurationError(f"the model cannot be served: its checkpoint lacks {name}")
    return weights


def _usable(take: Take, name: str, shape: tuple[int, ...]) -> Weights | None:
    weights = take(name)
    if weights is None:
        return None
    if weights.shape != shape:
        raise ConfigurationError(
            f"the model cannot be served: {name} is {tuple(weights.shape)} in its checkpoint, and {shape} by its "
            "configuration"
        )
    if isinstance(weights, BlockRows):
        return weights
    return (weights if weights.dtype in library.DTYPES else weights.float()).contiguous()


def _parts(tensors: list[Any]) -> ctypes.Array[library.WeightRows]:
    return (library.WeightRows * len(tensors))(*map(library.part, tensors))


# With hooks, the library runs ranges of layers that are long enough for the calls between them to cost nothing: about this many
# tokens x layers.
_TOKEN_LAYERS_PER_RANGE = 128


def supports(config: Any, dtype: torch.dtype, device: torch.device | str = "cpu") -> str | None:
    """Why `NativeLlamaForward` cannot compute this model here; None if it can. May compile the library."""
    reason = refusal(config, dtype, torch.device(device))
    if reason is not None:
        return reason
    try:
        found = library.instruction_set(dtype)
    except BuildFailed as error:
        return str(error)
    return None if found else f"this processor has no kernels for {dtype}"


class NativeLlamaForward:
    """Owns packed copies of the weights and the threads that use them. One step runs at a time.

    Call `use_cache` before the first step.
    """

    def __init__(
        self,
        config: Any,
        take: Take | None,
        *,
        dtype: torch.dtype,
        threads: int,
        rotary: tuple[torch.Tensor, float] | None = None,
        instruction_set: str = "",
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        """`rotary` has the inverse frequencies and the scaling; with None they follow from the configuration. Without `take` call
        `use_file` next.

        `instruction_set` forbids all better ones than the one named.
        """
        self.generates = True  # False: there is no head, so the logits mean nothing
        self._architecture = describe(config)
        self._dtype = dtype
        self._cache: torch.Tensor | None = None
        self._groups = 0
        self._logits = torch.empty(0, self._architecture.vocab)
        self._hidden = torch.empty(0, self._architecture.hidden)
        native = library.load()
        cores = cores_for(threads)
        a = self._architecture
        spec = library.Spec(
            layers=a.layers,
            hidden=a.hidden,
            intermediate=a.intermediate,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            vocab=a.vocab,
            dtype=library.DTYPES[dtype],
            qk_norm=a.qk_norm,
            eps=a.eps,
        )
        made = native.tandem_create(spec, (c_int32 * len(cores))(*cores), len(cores), instruction_set.encode())
        if made is None:
            raise ConfigurationError(f"the native model cannot be made: {library.last_error()}")
        self._model: int = made
        self._close = weakref.finalize(self, native.tandem_destroy, made)
        # At exit a step may be running in another thread, and the system frees everything anyway.
        self._close.atexit = False
        self._native = native
        self._embedding: Weights | None = None
        self.file_bytes = 0  # size of the mapped file of weights; 0: the weights are this process's own
        if take is not None:
            self._embedding = load_weights(made, a, take, progress)
            self._set_rotary(*rotary_of(config) if rotary is None else rotary)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | os.PathLike[str],
        config: Any,
        *,
        dtype: torch.dtype,
        threads: int,
        progress: Callable[[float], None] = lambda share: None,
        may_lack_head: bool = False,
    ) -> NativeLlamaForward:
        """Loads safetensors files without a torch model. With `may_lack_head` a checkpoint without a head is accepted: it makes vectors, and
        its logits mean nothing."""
        files = Checkpoint(Path(folder), dtype)
        generates = config.tie_word_embeddings or files.holds_head or not may_lack_head
        take = files.take if generates else files.take_embedding_for_head
        forward = cls(config, take, dtype=dtype, threads=threads, progress=progress)
        forward.generates = generates
        refuse_leftovers("the model", files.left, config)
        return forward

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        *,
        threads: int,
        instruction_set: str = "",
        release: bool = False,
        progress: Callable[[float], None] = lambda share: None,
    ) -> NativeLlamaForward:
        """Packs a transformers model. With `release` each matrix is freed as soon as it is packed, so that the weights are never in memory
        twice; the module cannot be used afterwards."""
        parameters = dict(module.named_parameters(remove_duplicate=False))

        def take(name: str) -> torch.Tensor | None:
            parameter = parameters.get(name)
            if parameter is None:
                return None
            data = parameter.data
            if release and not data.numel():
                return None  # freed already, under the other of its two names
            if release:
                parameter.data = torch.empty(0, dtype=data.dtype)
            return data

        config: Any = module.config
        body: Any = module.model
        rotary = body.rotary_emb.inv_freq, body.rotary_emb.attention_scaling
        return cls(
            config,
            take,
            dtype=next(iter(parameters.values())).dtype,
            threads=threads,
            rotary=rotary,
            instruction_set=instruction_set,
            progress=progress,
        )

    def write_file(self, file: int) -> None:
        """Writes all weights to an empty file, which only the same library may read. Raises an InternalError without room."""
        checked(self._native.tandem_write_weights(self._model, file))

    def use_file(self, file: int) -> None:
        """Maps the weights that a model like this one wrote, and frees its own. The file may be closed afterwards."""
        checked(self._native.tandem_use_weights(self._model, file))
        self._embedding = None
        self.file_bytes = os.fstat(file).st_size

    def use_cache(self, kv_cache: torch.Tensor, groups: Sequence[KVCacheGroup]) -> None:
        """Sets the KV cache tensor [num_blocks, slots, 2, num_kv_heads, block_size, head_dim]; slot s holds layer s of its group."""
        a = self._architecture
        expected = (2, a.kv_heads, groups[0].block_size, a.head_dim)
        if kv_cache.shape[2:] != expected or kv_cache.dtype != self._dtype or not kv_cache.is_contiguous():
            raise InternalError(
                f"a KV cache of {tuple(kv_cache.shape)} {kv_cache.dtype} does not fit the model's {expected}"
            )
        group_of, slot_of, window_of = ((c_int32 * a.layers)() for _ in range(3))
        for index, group in enumerate(groups):
            for slot, layer in enumerate(group.layers):
                group_of[layer], slot_of[layer] = index, slot
                window_of[layer] = group.window or 0
        layout = library.CacheLayout(
            data=kv_cache.data_ptr(),
            blocks=kv_cache.shape[0],
            slots=kv_cache.shape[1],
            block_size=groups[0].block_size,
            layer_group=group_of,
            layer_slot=slot_of,
            layer_window=window_of,
            groups=len(groups),
        )
        checked(self._native.tandem_use_cache(self._model, layout))
        self._cache = kv_cache
        self._groups = len(groups)

    def __call__(self, batch: Batch, hooks: LayerHooks | None = None) -> torch.Tensor:
        if not self._close.alive:
            raise InternalError("the native model is closed")
        native, model, layers = self._native, self._model, self._architecture.layers
        # The library keeps these pointers until the step's last call, so the tensors must live until then.
        wanted = last_rows(batch)
        given = given_rows(batch, self._dtype, self._architecture.hidden)
        step = step_batch(batch, self._groups, wanted, given)
        checked(native.tandem_begin(model, step))
        if hooks is None:
            checked(native.tandem_run_layers(model, 0, layers))
        else:
            self._run_with_hooks(hooks, max(1, _TOKEN_LAYERS_PER_RANGE // batch.num_tokens))
        rows = batch.logit_rows.shape[0]
        if rows > self._logits.shape[0]:
            self._logits = torch.empty(rows, self._architecture.vocab)
        logits = self._logits[:rows]
        vocab, hidden = self._architecture.vocab, self._architecture.hidden
        if batch.hidden_rows is None:
            checked(native.tandem_logits(model, logits.data_ptr(), vocab))
        else:
            found = torch.empty(batch.hidden_rows.shape[0], hidden)
            logit_places, hidden_places = (
                torch.searchsorted(wanted, rows) for rows in (batch.logit_rows, batch.hidden_rows)
            )
            checked(
                native.tandem_logits_of(model, logit_places.data_ptr(), len(logit_places), logits.data_ptr(), vocab)
            )
            checked(
                native.tandem_hidden_of(model, hidden_places.data_ptr(), len(hidden_places), found.data_ptr(), hidden)
            )
            self._hidden = found
        del step, given
        return logits

    @property
    def hidden(self) -> torch.Tensor:
        return self._hidden

    @property
    def weight_bytes(self) -> int:
        """The memory of the packed matrices. The embedding is not among them: it is read where it lies, in a file."""
        return int(self._native.tandem_weight_bytes(self._model))

    def close(self) -> None:
        """Ends the threads and frees the memory. No step may run afterwards. Idempotent."""
        self._close()

    def profile(self, on: bool) -> dict[str, int]:
        """Turns profiling on or off. Returns the nanoseconds per kind of work since it was last turned on."""
        times = (c_int64 * len(library.PHASES))()
        checked(self._native.tandem_profile(self._model, on, times))
        return dict(zip(library.PHASES, times, strict=True))

    def _run_with_hooks(self, hooks: LayerHooks, step: int) -> None:
        layers = self._architecture.layers
        for first in range(0, layers, step):
            last = min(layers, first + step)
            for layer in range(first, last):
                hooks.wait_for_layer_load(layer)
            checked(self._native.tandem_run_layers(self._model, first, last))
            for layer in range(first, last):
                hooks.save_kv_layer(layer)

    def _set_rotary(self, inverse_frequencies: torch.Tensor, scaling: float) -> None:
        frequencies: list[float] = inverse_frequencies.float().tolist()
        checked(
            self._native.tandem_set_rotary(
                self._model, (ctypes.c_float * len(frequencies))(*frequencies), len(frequencies), float(scaling)
            )
        )


def last_rows(batch: Batch) -> torch.Tensor:
    """The rows that the last layer computes for logits or hidden states."""
    if batch.hidden_rows is None:
        return batch.logit_rows
    return torch.from_numpy(np.union1d(batch.logit_rows.numpy(), batch.hidden_rows.numpy()))


def given_rows(batch: Batch, dtype: torch.dtype, hidden: int) -> torch.Tensor | None:
    """The rows that replace tokens' embeddings, in float32 but rounded to the embeddings' dtype; None without any."""
    if batch.image_states is None:
        return None
    if batch.image_states.shape[-1] != hidden:
        raise InternalError(f"rows of {batch.image_states.shape[-1]} numbers for a model of {hidden}")
    return batch.image_states.to(dtype).float().contiguous()


def step_batch(
    batch: Batch, groups: int, rows: torch.Tensor | None = None, given: torch.Tensor | None = None
) -> library.StepBatch:
    """Describes a batch to the library by pointers into its tensors, which must outlive the step. So must `rows`, the rows that the last
    layer computes if these are not `logit_rows`, and `given`, which replaces some embeddings."""
    rows = batch.logit_rows if rows is None else rows
    tables = batch.block_tables
    if len(tables) != groups:
        raise InternalError(f"a batch of {len(tables)} cache groups for a cache of {groups}")
    pointers = c_void_p * groups
    return library.StepBatch(
        tokens=batch.num_tokens,
        requests=batch.num_requests,
        token_ids=batch.token_ids.data_ptr(),
        positions=batch.positions.data_ptr(),
        query_start=batch.query_start.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        slot_mapping=pointers(*(slots.data_ptr() for slots in batch.slot_mapping)),
        block_tables=pointers(*(table.data_ptr() for table in tables)),
        block_table_strides=(c_int64 * groups)(*(table.stride(0) for table in tables)),
        logit_rows=rows.data_ptr(),
        num_logit_rows=rows.shape[0],
        given_rows=batch.image_rows.data_ptr() if given is not None and batch.image_rows is not None else None,
        given=given.data_ptr() if given is not None else None,
        num_given_rows=given.shape[0] if given is not None else 0,
    )


def rotary_of(config: Any) -> tuple[torch.Tensor, float]:
    """The inverse frequencies, and the factor of cosines and sines."""
    rope = rope_parameters(config)
    if rope.get("rope_type", "default") == "default":
        size = head_size(config)
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0
    # It is the same for every supported type of model. Imported late, because importing transformers takes seconds.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary: Any = LlamaRotaryEmbedding(config)
    return rotary.inv_freq, rotary.attention_scaling


def cores_for(threads: int) -> list[int]:
    """A core for each thread, or -1 to let it run anywhere.

    Threads are bound only if this process has exactly as many cores. With more cores the system places threads better, because another
    node on this machine would bind its threads to the same ones.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [-1] * max(1, threads)
    usable = sorted(os.sched_getaffinity(0))
    count = min(threads or len(usable), len(usable))
    return usable if count == len(usable) else [-1] * count
