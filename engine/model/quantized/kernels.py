"""Linear layers whose matrix stays quantized, by libraries' kernels: torch's for row-wise FP8 and 4 bits, FlashInfer's for block-wise
FP8.

Each kernel is tried on the matrix itself. If it does not run here, or its result differs from the matrix's numbers, an ordinary layer
is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from tandem.engine.model.kernel_linear import KernelLinear
from tandem.engine.model.quantized.formats import (
    Kind,
    QuantizedCheckpoint,
    Tensors,
    codes_of,
    dense,
    fp8_scales,
    kind_of,
)
from tandem.engine.model.quantized.round_rows import quantize_rows

_BLOCK = 128  # rows and columns of a block with FP8
_GROUPS = (32, 64, 128, 256)  # the numbers of inputs per scale that torch's kernel takes
_INNER_TILES = 8
_ROWS_TRIED = 4
# Relative to the largest value. Activations are rounded to eight bits; the errors of the sums are far smaller.
_TOLERANCE = 0.06


class ScaledMatrix(KernelLinear):
    """FP8 with scales."""

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._keep(weight=weight, scales=scales)
        self.bias = bias

    @property
    def outputs(self) -> int:
        return len(self.weight)

    def joined(self, others: Sequence[Self]) -> Self | None:
        all_of = (self, *others)
        weight, scales = (torch.cat([getattr(one, part) for one in all_of]) for part in ("weight", "scales"))
        return type(self)(weight, scales, _biases(all_of))


class RowScaled(ScaledMatrix):
    """A scale for each output. Activations are rounded to FP8 with a scale for each row."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, scales.expand(len(weight), 1).contiguous(), bias)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        rounded, scales = quantize_rows(rows)
        return torch._scaled_mm(rounded, self.weight.t(), scales, self.scales.t(), out_dtype=torch.bfloat16)


class BlockScaled(ScaledMatrix):
    """A scale for each block, by FlashInfer's kernel on Hopper."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, scales, bias)
        self._multiply: Any = importlib.import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._multiply(rows.contiguous(), self.weight.data, None, self.scales.data)
        return out

    def joined(self, others: Sequence[Self]) -> Self | None:
        return None if any(one.outputs % _BLOCK for one in (self, *others)[:-1]) else super().joined(others)


class FourBit(KernelLinear):
    """Four bits with a scale and a zero point for each group of inputs, by torch's kernel."""

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor

    def __init__(
        self,
        codes: torch.Tensor,  # [outputs, inputs], 0 to 15
        scales_and_zeros: torch.Tensor,  # [groups, outputs, 2]: (code - 8) * scale + zero
        order: torch.Tensor | None,  # the order of the inputs; None: unchanged
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self._group = self.in_features // len(scales_and_zeros)
        self._keep(packed=_pack(codes), scales_and_zeros=scales_and_zeros)
        self._order = order
        self.bias = bias

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        on_cpu = rows.device.type == "cpu"
        multiply = torch._weight_int4pack_mm_for_cpu if on_cpu else torch._weight_int4pack_mm
        rows = rows.contiguous() if self._order is None else rows.index_select(1, self._order)
        return multiply(rows, self.packed, self._group, self.scales_and_zeros)

    @property
    def outputs(self) -> int:
        return self.scales_and_zeros.shape[1]

    def joined(self, others: Sequence[Self]) -> Self | None:
        all_of = (self, *others)
        if any(one._group != self._group or not _are_equal(one._order, self._order) for one in others):
            return None
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        made.in_features, made._group, made._order = self.in_features, self._group, self._order
        made.out_features = sum(one.out_features for one in all_of)
        made._keep(
            packed=torch.cat([one.packed for one in all_of]),
            scales_and_zeros=torch.cat([one.scales_and_zeros for one in all_of], dim=1).contiguous(),
        )
        made.bias = _biases(all_of)
        return made


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    if codes.device.type == "cpu":
        return torch._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    return torch._convert_weight_to_int4pack(pairs.contiguous(), _INNER_TILES)


def _biases(layers: Sequence[KernelLinear]) -> torch.Tensor | None:
    given = [layer.bias for layer in layers if layer.bias is not None]
    if not given:
        return None
    return torch.cat([given[0].new_zeros(layer.outputs) if layer.bias is None else layer.bias for layer in layers])


def kernel_for(
    tensors: Tensors, checkpoint: QuantizedCheckpoint, dtype: torch.dtype
) -> tuple[KernelLinear | None, str]:
    """Returns a layer that computes with the quantized matrix, or None and the reason why there is none."""
    bias = tensors.get("bias")
    bias = None if bias is None else bias.to(dtype)
    try:
        made = _made(tensors, checkpoint, dtype, bias)
        if isinstance(made, str):
            return None, made
        return (made, "") if _computes(made, tensors, checkpoint, dtype) else (None, "the kernel finds something else")
    except Exception as error:  # a library may raise anything if it does not run here
        return None, f"the kernel does not run here: {str(error).strip().partition(chr(10))[0]}"


def _made(
    tensors: Tensors, checkpoint: QuantizedCheckpoint, dtype: torch.dtype, bias: torch.Tensor | None
) -> KernelLinear | str:
    kind = kind_of(tensors, checkpoint.method)
    if dtype is not torch.bfloat16:
        return f"the kernels compute in bfloat16, not in {dtype}"
    if kind is Kind.FP8:
        weight, scales = tensors["weight"], fp8_scales(tensors)
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            return f"a matrix of {tuple(weight.shape)}"
        if scales.shape in ((1, 1), (weight.shape[0], 1)):
            return RowScaled(weight, scales, bias)
        blocks = tuple(-(-size // _BLOCK) for size in weight.shape)
        if tuple(scales.shape) != blocks:
            return f"a scale for each of {tuple(scales.shape)} blocks"
        return BlockScaled(weight, scales.contiguous(), bias)
    if kind is Kind.INT8 or checkpoint.bits != 4:
        return "no kernel for eight or two bits is used here"
    codes, zeros, scales, groups = codes_of(kind, tensors, 4, checkpoint.zeros_less_one)
    if kind is Kind.PACKED:
        if codes.min() < -8 or codes.max() > 7:
            return "no kernel for eight or two bits is used here"
        codes = codes + 8
        zeros = torch.full_like(scales, 8) if zeros is None else zeros + 8
    outputs, inputs = codes.shape
    if scales.shape[1] == 1:  # one scale for a whole row is repeated for as many groups as the kernel needs
        count = inputs // _GROUPS[-1]
        scales, zeros = scales.expand(-1, count), zeros.expand(-1, count) if zeros is not None else None
        groups = None
    group = inputs // max(1, scales.shape[1])
    order = None
    if groups is not None:
        in_order = torch.arange(inputs, device=groups.device) // group
        if not torch.equal(groups.long(), in_order):  # GPTQ with `desc_act`: the inputs are reordered first
            order = groups.long().argsort(stable=True)
            if not torch.equal(groups.long()[order], in_order):
                return "its groups are of different sizes"
            codes = codes[:, order]
    if group not in _GROUPS or inputs % (_INNER_TILES * 16) or outputs % 16 or zeros is None:
        return f"a matrix of {outputs} x {inputs} in groups of {group}"
    offsets = (8 - zeros.float()) * scales.float()
    both = torch.stack((scales.float(), offsets), dim=-1).transpose(0, 1).contiguous().to(dtype)
    return FourBit(codes, both, order, bias)


def _computes(made: KernelLinear, tensors: Tensors, checkpoint: QuantizedCheckpoint, dtype: torch.dtype) -> bool:
    inputs = made.in_features
    device = next(made.parameters()).device
    x = (torch.arange(_ROWS_TRIED * inputs, device=device).view(_ROWS_TRIED, inputs) * 0.37).sin().to(dtype)
    right = x.float() @ dense({name: tensors[name] for name in tensors if name != "bias"}, checkpoint).t()
    found = made.product(x).float()
    error = (found - right).abs().max()
    return bool(error <= _TOLERANCE * right.abs().max())
