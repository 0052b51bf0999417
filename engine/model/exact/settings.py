"""Which settings and models cannot have the same bits, as far as shows without loading anything. Commands read it, so its imports are
light."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import ConfigurationError
from tandem.engine.config import EngineConfig
from tandem.engine.model.native.model_types import NATIVE_TYPES

DTYPES = ("float32", "bfloat16")
INSTEAD = "or leave model.exact at auto"


def is_required(engine: EngineConfig) -> bool:
    return engine.model.exact == "require"


def refusals(engine: EngineConfig, ranks: int) -> Iterator[tuple[str, str]]:
    """Yields each setting that speaks against it, and the end of a sentence about that. `ranks`: of one node."""
    if not is_required(engine):
        return
    if ranks > 1:
        yield (
            "model.exact",
            f"is require, but a node has {ranks} ranks, and transformers computes a model on several: the order of its sums depends on the "
            f"batch. Set tensor_parallel, pipeline_parallel and context_parallel to 1, {INSTEAD}",
        )
    for name, value, why, right in _against(engine):
        yield name, f"is {value}, but model.exact is require, and {why}: {right}, {INSTEAD}"


def _against(engine: EngineConfig) -> Iterator[tuple[str, object, str, str]]:
    model, general = engine.model, "the order of its sums depends on the batch"
    if model.device.startswith("cuda") and model.dtype == "float32":
        yield "model.dtype", model.dtype, "FlashInfer does not compute in it", "set it to bfloat16"
    if model.dtype not in ("auto", *DTYPES):
        right = f"set it to {' or '.join(DTYPES)}"
        yield "model.dtype", model.dtype, f"transformers computes this type: {general}", right
    if engine.cache.dtype != "auto":
        yield "cache.dtype", engine.cache.dtype, "the native path keeps no such KV", "set it to auto"
    if engine.scheduler.max_loras:
        why = f"transformers computes a model with adapters: {general}"
        yield "scheduler.max_loras", engine.scheduler.max_loras, why, "set it to 0"
    if model.hidden_states_folder:
        why = f"transformers computes a model whose hidden states are written: {general}"
        yield "model.hidden_states_folder", model.hidden_states_folder, why, "leave it out"


def check_type(engine: EngineConfig, model_type: str | None) -> None:
    """Raises a ConfigurationError for a type of model that the native library does not compute. None: it is not known yet."""
    if is_required(engine) and model_type is not None and model_type not in NATIVE_TYPES:
        raise ConfigurationError(
            f"model.exact is require, but a model of type {model_type} is computed by transformers, whose sums depend on the batch: "
            f"serve one of type {', '.join(NATIVE_TYPES)}, {INSTEAD}"
        )
