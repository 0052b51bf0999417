"""The formats of quantized matrices: which tensors a checkpoint has for one, and which numbers they stand for.

The tensors' names and dtypes show the format; the configuration is read only for what they leave open.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.source import ModelSource
from tandem.engine.model.tensor_files import open_tensors

Tensors = Mapping[str, torch.Tensor]
"""The tensors of one linear layer, by the part of their names after the layer's."""

METHODS = ("fp8", "compressed-tensors", "awq", "gptq")
_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_USUAL_BLOCK = (128, 128)
# A layer with one of these tensors is quantized.
_MARKS = ("weight_scale", "weight_scale_inv", "qweight", "weight_packed")
# Further tensors that such a layer may have. Scales of activations and of KV are not used: they are computed here.
_ASIDE = ("bias", "input_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale")
# The order in which AWQ packs eight columns.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Kind(enum.Enum):
    FP8 = "fp8"
    INT8 = "int8"
    PACKED = "packed"  # compressed-tensors: outputs in rows, inputs packed
    AWQ = "awq"
    GPTQ = "gptq"


_NEEDED = {
    Kind.FP8: {"weight"},
    Kind.INT8: {"weight", "weight_scale"},
    Kind.PACKED: {"weight_packed", "weight_scale", "weight_shape"},
    Kind.AWQ: {"qweight", "qzeros", "scales"},
    Kind.GPTQ: {"qweight", "qzeros", "scales"},
}
_ALLOWED = {
    Kind.FP8: {"weight_scale", "weight_scale_inv"},
    Kind.INT8: {"weight_zero_point"},
    Kind.PACKED: {"weight_zero_point", "weight_g_idx"},
    Kind.AWQ: set[str](),
    Kind.GPTQ: {"g_idx"},
}


class TensorFacts(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class QuantizedCheckpoint(msgspec.Struct, frozen=True):
    method: str
    bits: int  # of a packed number, with GPTQ and AWQ
    zeros_less_one: bool  # zero points are stored minus one, as in GPTQ's first format
    block: tuple[int, int]  # (outputs, inputs) that share a scale, with block-wise FP8
    layers: dict[str, dict[str, TensorFacts]]  # the tensors of each quantized layer, by name


def read_checkpoint(source: ModelSource, config: Any) -> QuantizedCheckpoint | None:
    """Reads which layers are quantized, and how. Returns None for a checkpoint that is not quantized, or whose format transformers must
    handle. Raises a ConfigurationError for a format that neither computes correctly."""
    written = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if not isinstance(written, dict) or written.get("quant_method") not in METHODS:
        return None
    method = str(written["quant_method"])
    problem = _problem(method, written)
    if problem is not None:
        raise ConfigurationError(f"{source.name} cannot be served: {problem}")
    layers = _layers(source)
    known = QuantizedCheckpoint(
        method,
        int(written.get("bits") or written.get("w_bit") or 4),
        method == "gptq" and written.get("checkpoint_format", "gptq") == "gptq",
        _block(written),
        layers,
    )
    for layer, tensors in layers.items():
        try:
            kind_of(tensors, method)
        except ValueError as error:
            raise ConfigurationError(f"{source.name} cannot be served: {layer} is {error}") from None
    return known


def unknown_bias(model: str, layer: str) -> ConfigurationError:
    return ConfigurationError(
        f"{model} cannot be served: {layer} has a bias in its checkpoint, and none by its configuration"
    )


def _problem(method: str, written: dict[str, Any]) -> str | None:
    if method == "awq" and str(written.get("version", "gemm")).lower() != "gemm":
        return f"AWQ's version {written['version']} packs weights otherwise than gemm, which is what is known here"
    bits, known = written.get("bits", written.get("w_bit", 4)), {"awq": (4,), "gptq": (2, 4, 8)}
    if method in known and bits not in known[method]:
        return f"{method} with {bits} bits; {' and '.join(map(str, known[method]))} are known here"
    if method == "gptq" and written.get("dynamic"):
        return "GPTQ with other settings for some of its layers (`dynamic`)"
    if method == "compressed-tensors":
        sparse = (written.get("sparsity_config") or {}).get("format", "dense")
        if sparse != "dense":
            return f"its weights are sparse ({sparse})"
        if written.get("transform_config"):
            return "its weights are rotated (`transform_config`)"
    return None


def _block(written: dict[str, Any]) -> tuple[int, int]:
    groups = (written.get("config_groups") or {}).values()
    said = [(group.get("weights") or {}).get("block_structure") for group in groups]
    size = written.get("weight_block_size") or next(filter(None, said), None) or _USUAL_BLOCK
    return int(size[0]), int(size[1])


def _layers(source: ModelSource) -> dict[str, dict[str, TensorFacts]]:
    found: dict[str, dict[str, TensorFacts]] = {}
    for name, file in open_tensors(source).items():
        layer, _, part = name.rpartition(".")
        described = file.get_slice(name)
        dtype = _DTYPES.get(described.get_dtype(), torch.float32)
        found.setdefault(layer, {})[part] = TensorFacts(dtype, tuple(described.get_shape()))
    return {layer: parts for layer, parts in found.items() if not parts.keys().isdisjoint(_MARKS)}


def kind_of(tensors: Mapping[str, TensorFacts | torch.Tensor], method: str) -> Kind:
    """The kind of a layer, from its tensors. Raises a ValueError that describes the layer if it is of no known kind."""
    kind = None
    if "qweight" in tensors:
        kind = Kind.AWQ if method == "awq" else Kind.GPTQ
    elif "weight_packed" in tensors and tensors["weight_packed"].dtype is torch.int32:
        kind = Kind.PACKED
    elif "weight" in tensors:
        kind = {torch.float8_e4m3fn: Kind.FP8, torch.int8: Kind.INT8}.get(tensors["weight"].dtype)
    names = set(tensors).difference(_ASIDE)
    if kind is None or not _NEEDED[kind] <= names <= _NEEDED[kind] | _ALLOWED[kind]:
        of = ", ".join(f"{part} ({str(tensors[part].dtype).removeprefix('torch.')})" for part in sorted(names))
        raise ValueError(f"quantized in a way that is not known here: {of}")
    return kind


def sizes_of(kind: Kind, tensors: Mapping[str, TensorFacts | torch.Tensor], bits: int) -> tuple[int, int] | None:
    """(outputs, inputs); None if only a tensor's content tells them."""
    if kind in (Kind.FP8, Kind.INT8):
        outputs, inputs = tensors["weight"].shape
        return int(outputs), int(inputs)
    if kind is Kind.AWQ:
        return int(tensors["qweight"].shape[1]) * 32 // bits, int(tensors["qweight"].shape[0])
    if kind is Kind.GPTQ:
        return int(tensors["qweight"].shape[1]), int(tensors["qweight"].shape[0]) * 32 // bits
    return None


def bits_of(kind: Kind, tensors: Tensors, inputs: int, bits: int) -> int:
    """Of one of the matrix's integers. `bits` is what the configuration says."""
    if kind is Kind.PACKED:
        return 32 * tensors["weight_packed"].shape[1] // inputs
    return 8 if kind is Kind.INT8 else bits


def dense(tensors: Tensors, checkpoint: QuantizedCheckpoint) -> torch.Tensor:
    """The numbers that a matrix stands for, [outputs, inputs] in float32."""
    kind, bits = kind_of(tensors, checkpoint.method), checkpoint.bits
    if kind is Kind.FP8:
        return tensors["weight"].float() * _spread(
            fp8_scales(tensors), tuple(tensors["weight"].shape), checkpoint.block
        )
    codes, zeros, scales, groups = codes_of(kind, tensors, bits, checkpoint.zeros_less_one)
    if groups is None:
        each = codes.shape[1] // scales.shape[1]
        groups = torch.arange(codes.shape[1], device=codes.device) // each
    if zeros is not None:
        codes = codes - zeros[:, groups]
    return codes.float() * scales.float()[:, groups]


def fp8_scales(tensors: Tensors) -> torch.Tensor:
    """The scales of the whole matrix, of its rows, or of its blocks, as two dimensions."""
    scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    if scales is None:
        return torch.ones(1, 1, device=tensors["weight"].device)
    scales = scales.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    return scales.reshape(-1, 1) if scales.dim() == 1 else scales


def _spread(scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """Repeats block scales to the matrix's shape. The last block of a row or column may be incomplete."""
    for axis, size in enumerate(shape):
        if scales.shape[axis] not in (1, size):
            scales = scales.repeat_interleave(block[axis], dim=axis).narrow(axis, 0, size)
    return scales


def codes_of(
    kind: Kind, tensors: Tensors, bits: int, zeros_less_one: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Returns the integers [outputs, inputs], their zero points and scales [outputs, groups], and each input's group; None instead of the
    last if the groups are in order."""
    if kind is Kind.INT8:
        scales = tensors["weight_scale"]
        scales = scales.reshape(1, 1).expand(tensors["weight"].shape[0], 1) if scales.numel() == 1 else scales
        scales = scales.reshape(-1, 1) if scales.dim() == 1 else scales
        zeros = tensors.get("weight_zero_point")
        return (tensors["weight"].int(), None if zeros is None else zeros.int().reshape(scales.shape), scales, None)
    if kind is Kind.PACKED:
        outputs, inputs = (int(size) for size in tensors["weight_shape"].tolist())
        packed, scales = tensors["weight_packed"], tensors["weight_scale"]
        bits = bits_of(kind, tensors, inputs, bits)
        middle = 1 << (bits - 1)
        codes = _unpacked(packed, bits)[:, :inputs] - middle
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = _unpacked(zeros.t(), bits).t()[:outputs] - middle
        return codes, zeros, scales, tensors.get("weight_g_idx")
    if kind is Kind.AWQ:
        order = torch.tensor(_AWQ_ORDER, device=tensors["qweight"].device).argsort()
        codes, zeros = (
            _unpacked(tensors[part], bits).view(tensors[part].shape[0], -1, 32 // bits)[:, :, order].flatten(1)
            for part in ("qweight", "qzeros")
        )
        return codes.t(), zeros.t(), tensors["scales"].t(), None
    codes, packed = _unpacked(tensors["qweight"].t(), bits), tensors["qzeros"]
    if zeros_less_one:
        # The one was subtracted from the packed numbers, so that a zero point of 0 has borrowed from the next.
        packed = packed + sum(1 << shift for shift in range(0, 32, bits))
    return codes, _unpacked(packed, bits).t(), tensors["scales"].t(), tensors.get("g_idx")


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks int32 [N, M] to [N, M * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    codes = (packed.contiguous()[:, :, None] >> shifts).bitwise_and_((1 << bits) - 1)
    return codes.flatten(1)


def tail_of(layer: str) -> str:
    """The part of a layer's name that a model and its checkpoint share. The parts before the layer's number may differ."""
    found = re.search(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..*)$", layer)
    return found[1] if found else layer
