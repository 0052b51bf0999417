"""The pieces on a GPU: products by torch's libraries, and the operations between them by Triton. Where a node must compute the same bits
in any company, Triton computes products, too."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from tandem.engine.model.cuda import triton_ops
from tandem.engine.model.pieces import Activation, Matrix, NotOneMatrix, Piece, replace_forward
from tandem.engine.model.sums import take_sum


class DevicePieces:
    """See Pieces. Merged matrices become one tensor, and their modules' own weights become views of it."""

    copies = False
    adds_updates = False
    turns_norms = True
    norms_add = True

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact

    def product(self, matrices: Sequence[Matrix]) -> Piece:
        kernels = [matrix.kernel for matrix in matrices if matrix.kernel is not None]
        if kernels:
            if self._exact:
                raise NotOneMatrix
            joined = kernels[0].joined(kernels[1:]) if len(kernels) == len(matrices) else None
            if joined is None:
                raise NotOneMatrix
            return joined
        weight, bias = _merged(matrices)
        if self._exact:
            return functools.partial(triton_ops.product_by_rows, weight=weight, bias=bias)

        def run(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight, bias)

        return run

    def gated(self, gate: Matrix, up: Matrix, down: Matrix, activation: Activation) -> Piece:
        first = self.product((gate, up))
        last = self.product((down,))

        def run(x: torch.Tensor) -> torch.Tensor:
            return last(triton_ops.gated(first(x), activation))

        return run

    def norm(self, weight: torch.Tensor, offset: float, eps: float) -> Piece:
        def run(x: torch.Tensor) -> torch.Tensor:
            parts = take_sum(x)
            if parts is None:
                return triton_ops.norm(x, weight, offset, eps)
            return triton_ops.add_and_norm(*parts, weight, offset, eps)

        return run


def take_rest(model: torch.nn.Module, pieces: DevicePieces) -> list[str]:
    """Replaces the linear layers that fusion has left as they are. Returns the names of other modules with weights that it left."""
    others = []
    for name, module in _left(model, ""):
        if type(module) is torch.nn.Linear:
            replace_forward(module, pieces.product([Matrix(module.weight, module.bias)]))
        elif not isinstance(module, torch.nn.Embedding):
            others.append(name)
    return others


def _left(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    if "forward" in module.__dict__:
        return  # a piece computes it, and all in it
    if next(module.parameters(recurse=False), None) is not None:
        yield name, module
    for child_name, child in module.named_children():
        yield from _left(child, f"{name}.{child_name}".removeprefix("."))


def _merged(matrices: Sequence[Matrix]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weights = [matrix.weight for matrix in matrices]
    weight = _side_by_side(weights)
    if weight is None:
        weight, start = torch.cat(weights), 0
        for part in weights:
            if isinstance(part, torch.nn.Parameter):
                part.data = weight[start : start + part.shape[0]]  # a view, so that the weights exist once
            start += part.shape[0]
    if all(matrix.bias is None for matrix in matrices):
        return weight, None
    biases = [
        matrix.weight.new_zeros(matrix.weight.shape[0]) if matrix.bias is None else matrix.bias for matrix in matrices
    ]
    return weight, torch.cat(biases)


def _side_by_side(weights: list[torch.Tensor]) -> torch.Tensor | None:
    """The weights as one tensor if they are adjacent in memory; otherwise None."""
    first = weights[0]
    end = first.data_ptr()
    for weight in weights:
        one_storage = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if weight.data_ptr() != end or not weight.is_contiguous() or not one_storage:
            return None
        end += weight.numel() * weight.element_size()
    rows = sum(weight.shape[0] for weight in weights)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
