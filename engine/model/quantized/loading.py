"""Loads quantized matrices through transformers, tensor by tensor and unchanged. Afterwards each becomes an ordinary linear layer, or on a
GPU one with a kernel, if the kernel's result is right."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tandem.base.errors import ConfigurationError
from tandem.engine.model.compressed import EXPANDS
from tandem.engine.model.kernel_linear import KernelLinear
from tandem.engine.model.quantized import experts, kernels
from tandem.engine.model.quantized.blocks import block_linear
from tandem.engine.model.quantized.formats import (
    QuantizedCheckpoint,
    TensorFacts,
    dense,
    kind_of,
    sizes_of,
    tail_of,
    unknown_bias,
)
from tandem.engine.model.quantized.parts import CheckpointFiles, QuantizedPart, is_ordinary
from tandem.engine.model.source import ModelSource
from tandem.engine.model.weight_formats import PartOf

log = logging.getLogger(__name__)

_METHOD = "tandem"


class QuantizedLinear(nn.Module):
    """Holds a layer's tensors after they are read, until `finish_loading` replaces it by a layer that computes."""

    def __init__(self, tensors: dict[str, TensorFacts], checkpoint: QuantizedCheckpoint, *, has_bias: bool) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.has_bias = has_bias  # according to the model's configuration
        for name, described in tensors.items():
            empty = torch.empty(described.shape, dtype=described.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer's tensors, without the bias of zeros that tools for GPTQ add to models without biases."""
        held = {name: parameter.data for name, parameter in self.named_parameters()}
        if "bias" in held and not self.has_bias and not held["bias"].any():
            del held["bias"]
        return held


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):  # type: ignore[misc]
    def __init__(self, checkpoint: QuantizedCheckpoint, in_parts: bool = False, **_: Any) -> None:
        self.quant_method = _METHOD
        self.checkpoint = checkpoint
        self.in_parts = in_parts


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        checkpoint: QuantizedCheckpoint = self.quantization_config.checkpoint
        experts.take_out(model, checkpoint)
        by_tail = {tail_of(layer): (layer, parts) for layer, parts in checkpoint.layers.items()}
        for name, module in list(model.named_modules()):
            found = by_tail.get(tail_of(name)) if isinstance(module, nn.Linear) else None
            if found is None:
                continue
            layer, parts = found
            size = sizes_of(kind_of(parts, checkpoint.method), parts, checkpoint.bits)
            if size is not None and size != (module.out_features, module.in_features):
                # The configuration does not fit the checkpoint. `load_model` refuses it and names the tensors.
                continue
            if self.quantization_config.in_parts:
                _put(model, name, QuantizedPart(layer, parts, checkpoint, module))
            else:
                _put(model, name, QuantizedLinear(parts, checkpoint, has_bias=module.bias is not None))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        self.remove_quantization_config(model)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def loading_options(config: Any, checkpoint: QuantizedCheckpoint, in_parts: bool) -> dict[str, Any]:
    """The options for `from_pretrained`. `in_parts`: it leaves the quantized matrices to `finish_loading`."""
    told = copy.deepcopy(config)
    text = told.get_text_config()
    if text is not told and getattr(text, "quantization_config", None) is not None:
        del text.quantization_config
    told.quantization_config = {"quant_method": _METHOD, "checkpoint": checkpoint, "in_parts": in_parts}
    return {"config": told}


def unread(keys: list[str], model: PreTrainedModel) -> list[str]:
    """Those of the checkpoint's tensors of which `finish_loading` reads no part."""
    read = {tail_of(module.layer) for module in model.modules() if isinstance(module, QuantizedPart)}
    of_experts = experts.reads(model)
    return [key for key in keys if tail_of(key.rpartition(".")[0]) not in read and not of_experts(key)]


def finish_loading(
    source: ModelSource, model: PreTrainedModel, dtype: torch.dtype, device: torch.device, part_of: PartOf | None = None
) -> None:
    """Replaces each quantized matrix by a layer that computes with it, or with this rank's part of it."""
    kinds = (QuantizedLinear, QuantizedPart)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    files = CheckpointFiles(source)
    kept = 0
    refused: set[str] = set()
    for name, module in found:
        if isinstance(module, QuantizedPart):
            assert part_of is not None
            tensors = module.read(files, part_of(name), device)
        else:
            tensors = module.tensors
        if "bias" in tensors and not module.has_bias:
            raise unknown_bias(source.name, name)
        made: KernelLinear | None = None
        if is_ordinary(tensors) or name.endswith(EXPANDS):
            pass
        elif not _may_stay(device):
            made = block_linear(tensors, module.checkpoint, dtype)
        else:
            made, reason = kernels.kernel_for(tensors, module.checkpoint, dtype)
            if reason and reason not in refused:
                refused.add(reason)
                log.warning("%s: some matrices take as much memory as in %s: %s", source.name, dtype, reason)
        kept += made is not None
        replacing: nn.Linear | KernelLinear = made or _as_linear(tensors, module.checkpoint, dtype)
        outputs = replacing.outputs if isinstance(replacing, KernelLinear) else replacing.out_features
        if replacing.bias is not None and replacing.bias.shape != (outputs,):  # torch would spread one number over all
            raise ConfigurationError(
                f"{source.name} cannot be served: {name}.bias is {tuple(replacing.bias.shape)} in its checkpoint, and ({outputs},) by its "
                "matrix"
            )
        if isinstance(module, QuantizedPart):
            replacing.out_features, replacing.in_features = module.out_features, module.in_features
        _put(model, name, replacing)
    try:
        of_experts = experts.put_back(model, files, dtype, device, part_of)
    except ValueError as error:
        raise ConfigurationError(f"{source.name} cannot be served: {error}") from None
    if of_experts and _may_stay(device):
        log.warning("%s: its experts take as much memory as in %s: no kernel for them is used here", source.name, dtype)
    log.info(
        "%s: %d matrices were quantized (%s), %d stay so",
        source.name,
        len(found) + of_experts,
        found[0][1].checkpoint.method if found else "none",
        kept,
    )


def _may_stay(device: torch.device) -> bool:
    """Whether there may be libraries' kernels for quantized matrices."""
    return device.type != "cpu"


def _as_linear(tensors: dict[str, torch.Tensor], checkpoint: QuantizedCheckpoint, dtype: torch.dtype) -> nn.Linear:
    bias = tensors.pop("bias", None)
    weight = (tensors["weight"] if is_ordinary(tensors) else dense(tensors, checkpoint)).to(dtype)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return linear


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
