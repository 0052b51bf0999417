"""Matrices of integers as the native library computes with them: blocks of 32, 64 or 128 inputs, each with a scale and a zero point."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tandem.engine.model.kernel_linear import KernelLinear
from tandem.engine.model.quantized.formats import (
    Kind,
    QuantizedCheckpoint,
    TensorFacts,
    Tensors,
    bits_of,
    codes_of,
    kind_of,
)
from tandem.engine.model.quantized.parts import Read, is_in_order, is_ordinary, part_of_matrix
from tandem.engine.model.shard import MatrixPart
from tandem.kernels import library
from tandem.kernels.compiler import BuildFailed
from tandem.kernels.library import BlockRows

_SIZES = (128, 64, 32)
_AT_ONCE = 1024  # outputs that are converted together, so that a load takes little memory besides the blocks


def read_blocks(
    facts: Mapping[str, TensorFacts], checkpoint: QuantizedCheckpoint, size: tuple[int, int], read: Read
) -> BlockRows | None:
    """Reads a layer's matrix of `size` (outputs, inputs). None if it cannot be blocks."""
    outputs, inputs = size
    step = _AT_ONCE if outputs % 32 == 0 else outputs
    pieces = []
    for first in range(0, outputs, step):
        part = MatrixPart(range(first, min(first + step, outputs)), range(inputs))
        made = blocks_of(part_of_matrix(facts, checkpoint, size, part, read), checkpoint)
        if made is None:
            return None
        pieces.append(made)
    return BlockRows(torch.cat([rows for rows, _ in pieces]).numpy(), pieces[0][1])


def blocks_of(tensors: Tensors, checkpoint: QuantizedCheckpoint) -> tuple[torch.Tensor, str] | None:
    """Returns the rows [outputs, bytes] and their kind. None for FP8, for shuffled inputs, and for groups that no block divides."""
    if is_ordinary(tensors) or (kind := kind_of(tensors, checkpoint.method)) is Kind.FP8:
        return None
    codes, zeros, scales, groups = codes_of(kind, tensors, checkpoint.bits, checkpoint.zeros_less_one)
    (outputs, inputs), count = codes.shape, scales.shape[1]
    group = inputs // count
    size = next((size for size in _SIZES if group % size == 0), None)
    if size is None or group * count != inputs or (groups is not None and not is_in_order(groups, count)):
        return None
    if zeros is None:
        zeros = torch.zeros_like(scales, dtype=torch.int32)
    # 4 bits are kept from 0 on, 8 bits around 0. A zero point moves with its codes.
    is_around_0, bits = (
        kind in (Kind.INT8, Kind.PACKED),
        4 if bits_of(kind, tensors, inputs, checkpoint.bits) <= 4 else 8,
    )
    moved = (8 if is_around_0 else 0) if bits == 4 else (0 if is_around_0 else -128)
    codes, zeros = codes + moved, zeros + moved
    if bits == 4:
        halves = codes.to(torch.uint8).view(outputs, -1, 2, 16)
        quants = halves[:, :, 0] | halves[:, :, 1] << 4
    else:
        quants = codes.to(torch.int8).view(torch.uint8)

    def of_blocks(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(group // size, dim=1).contiguous().unsqueeze(2).view(torch.uint8)

    rows = torch.cat(
        (
            of_blocks(scales.float()),
            of_blocks(zeros.to(torch.int16)),
            quants.reshape(outputs, inputs // size, size * bits // 8),
        ),
        dim=2,
    )
    return rows.flatten(1), f"I{bits}_{size}"


class BlockLinear(KernelLinear):
    """A matrix in blocks, for the CPU kernels to take. Until they do, or it is widened for good, it is widened for each product."""

    _rows: torch.Tensor
    _weight: torch.Tensor | None

    def __init__(self, rows: torch.Tensor, kind: str, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._keep(_rows=rows)
        self.register_parameter("_weight", None)
        self._kind, self._dtype, self.bias = kind, dtype, bias
        self.out_features, self.in_features = self.blocks().shape
        self._outputs = self.out_features

    @property
    def outputs(self) -> int:
        return self._outputs

    def blocks(self) -> BlockRows:
        return BlockRows(self._rows.numpy(), self._kind)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, library.widen(self.blocks(), rows.dtype) if self._weight is None else self._weight)

    def widen(self) -> None:
        if self._rows.numel():  # otherwise a piece has it
            self._keep(_weight=library.widen(self.blocks(), self._dtype))
            self._rows.data = torch.empty(0, dtype=torch.uint8)


def block_linear(tensors: Tensors, checkpoint: QuantizedCheckpoint, dtype: torch.dtype) -> BlockLinear | None:
    """None if the matrix cannot be blocks, or there are no fast kernels for this dtype."""
    try:
        if library.instruction_set(dtype) in (None, "portable"):
            return None
    except BuildFailed:
        return None
    made = blocks_of(tensors, checkpoint)
    bias = tensors.get("bias")
    return None if made is None else BlockLinear(*made, None if bias is None else bias.to(dtype), dtype)
