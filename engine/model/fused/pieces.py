"""What can be computed in one operation instead of several, and the plain formula that it has to agree with."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch
import torch.nn.functional as F

Piece = Callable[[torch.Tensor], torch.Tensor]
"""Rows [..., inputs] to rows [..., outputs]."""


class Activation(enum.Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class Matrix(msgspec.Struct, frozen=True):
    """A linear layer, or rows of one."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None


class Pieces(Protocol):
    """What computes them. What is given may be released once it was taken."""

    # Whether matrices are copied, so that a model may give its own up.
    copies: bool

    def product(self, matrices: Sequence[Matrix]) -> Piece:
        """x times all of them, results side by side."""
        ...

    def gated(self, gate: Matrix, up: Matrix, down: Matrix, activation: Activation) -> Piece:
        """down(activation(gate(x)) * up(x))"""
        ...

    def norm(self, weight: torch.Tensor, offset: float, eps: float) -> Piece:
        """RMSNorm: (weight + offset) * x / sqrt(mean(x²) + eps)"""
        ...


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    return F.silu(x) if activation is Activation.SILU else F.gelu(x, approximate="tanh")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + offset)).to(x.dtype)


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """[heads, T, D], by angles [T, D] of which both halves are alike: pairs are (i, i + D / 2)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cosines + turned * sines
