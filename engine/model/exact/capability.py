"""Refuses to load what cannot promise the same bits, and adds how the node computes to its model's content."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import torch

from tandem.base.errors import ConfigurationError
from tandem.base.wings import find_wing
from tandem.engine.config import EngineConfig
from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.exact.settings import INSTEAD, is_required, refusals
from tandem.engine.model.native.architecture import refusal
from tandem.engine.model.native.model_types import NATIVE_TYPES
from tandem.engine.model.runner import ModelInfo
from tandem.kernels import library
from tandem.kernels.build import library_path
from tandem.machine.digests import digest_of
from tandem.wire.nodes import COMPUTED_BY

ON_GPUS = "tandem.engine.model.cuda.same_bits"


def capability(loading: ModelLoad) -> Capability | None:
    engine = EngineConfig(model=loading.model, cache=loading.cache, scheduler=loading.scheduler)
    if not is_required(engine):
        return None
    for name, why in refusals(engine, 1 if loading.shard is None else loading.shard.size):
        raise ConfigurationError(f"{name} {why}")
    return RequiredBits(loading)


class RequiredBits(Capability):
    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading

    def on_general_path(self, why: str) -> None:
        loading = self._loading
        if loading.device.type == "cuda" and find_wing(ON_GPUS) is not None:
            # The same models as on CPUs. Triton and FlashInfer compute them, or the load fails.
            why = refusal(loading.config, loading.dtype, torch.device("cpu")) or ""
            if not why and loading.dtype is torch.bfloat16:
                return
            why = why or f"FlashInfer does not compute in {loading.dtype}"
        raise ConfigurationError(
            f"{self._loading.source.name} cannot be served with model.exact: require. transformers computes it, because {why}; the "
            f"order of its sums depends on the batch. Serve a model of type {', '.join(NATIVE_TYPES)} in bfloat16, or on CPUs in "
            f"float32, {INSTEAD}"
        )

    def complete(self, info: ModelInfo) -> ModelInfo:
        loading = self._loading
        if loading.device.type == "cuda":
            way = cast("Any", find_wing(ON_GPUS)).way_of_computing(loading.device, loading.cache.block_size)
        else:
            way = way_of_computing(loading.dtype)
        return msgspec.structs.replace(info, content=f"{info.content}{COMPUTED_BY}{way}")


def way_of_computing(dtype: torch.dtype) -> str:
    """Names everything besides the model's content that decides in which order sums are made: equal names give equal bits. The library
    is known by its content, because another compiler may contract products otherwise."""
    name = str(dtype).removeprefix("torch.")
    sampled_by = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    return f"{library.instruction_set(dtype)}-{name}-{sampled_by}-{digest_of(library_path())[:12]}"
