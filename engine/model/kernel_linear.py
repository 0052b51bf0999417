"""Linear layers that kernels compute, from a matrix in a form of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tandem.kernels.library import BlockRows


class KernelLinear(nn.Module):
    """A linear layer with a quantized matrix. Several of one kind that read the same tensor may be joined into one."""

    # The whole layer's; a rank's part may have fewer.
    in_features: int
    out_features: int
    bias: torch.Tensor | None
    joined: Callable[..., KernelLinear | None]  # see fused.pieces.JoinableKernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = self.product(rows).to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """How many outputs it computes itself."""
        raise NotImplementedError

    def blocks(self) -> BlockRows | None:
        """The matrix, if the CPU kernels compute with it."""
        return None

    def widen(self) -> None:
        """Makes an ordinary matrix of one with which only pieces compute, if none has taken it."""

    def _keep(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            # It is a parameter, so that it counts as one of the model's weights.
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def widen_left(model: nn.Module) -> None:
    """Call it once pieces have taken the matrices that they compute with."""
    for module in model.modules():
        if isinstance(module, KernelLinear):
            module.widen()
