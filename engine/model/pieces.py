"""The contract of fused operations (`Pieces`), and the plain formula that each must agree with. `fused/` puts them into models; `take_rotary`
hands attention what was put off until then."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
import torch.nn.functional as F

from tandem.base.errors import InternalError

if TYPE_CHECKING:
    from tandem.engine.model.adapters import UpdatedLayer

Piece = Callable[[torch.Tensor], torch.Tensor]
"""Maps rows [..., inputs] to rows [..., outputs]."""


class Activation(enum.Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class JoinableKernel(Protocol):
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def joined(self, others: Sequence[Any]) -> Piece | None:
        """One kernel for this one's outputs, followed by those of others of its kind; None if they cannot be one matrix."""


class Matrix(msgspec.Struct, frozen=True):
    """A linear layer, or rows of one."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None
    kernel: JoinableKernel | None = None  # computes the product from a quantized matrix
    adapted: UpdatedLayer | None = None  # the adapters' updates, if a piece must add them
    first: int = 0  # the first of the layer's outputs, if this is a part of them


class NotOneMatrix(Exception):
    """The matrices are quantized in different ways."""


class Norm(msgspec.Struct, frozen=True):
    """RMSNorm: (weight + offset) * x / sqrt(mean(x²) + eps)"""

    weight: torch.Tensor
    offset: float
    eps: float


class Rotary(msgspec.Struct, frozen=True):
    """What attention must still apply to queries and keys: norms over each head, if given, then the rotary embedding. Cosines and sines
    are [T, D] each, with the first half repeated in the second: element i rotates with i + D / 2."""

    cosines: torch.Tensor
    sines: torch.Tensor
    query_norm: Norm | None = None  # both norms or none, with the same offset and epsilon
    key_norm: Norm | None = None


class Pieces(Protocol):
    """Makes fused operations for one kind of device."""

    # Whether matrices are copied, so that the model may free its own.
    copies: bool
    # Whether pieces add adapters' updates. Otherwise each linear layer's result must be computed by itself.
    adds_updates: bool
    # Whether norms of queries and keys can wait until attention with the rotary embedding.
    turns_norms: bool
    # Whether norms add up what is put off until then: see tandem.engine.model.sums.
    norms_add: bool

    def product(self, matrices: Sequence[Matrix]) -> Piece:
        """x times all the matrices, with the results side by side. Raises NotOneMatrix."""

    def gated(self, gate: Matrix, up: Matrix, down: Matrix, activation: Activation) -> Piece:
        """down(activation(gate(x)) * up(x))"""

    def norm(self, weight: torch.Tensor, offset: float, eps: float) -> Piece: ...


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    return F.silu(x) if activation is Activation.SILU else F.gelu(x, approximate="tanh")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + offset)).to(x.dtype)


_LARGEST_FP8 = 448.0


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Converts to FP8. Values that are too large become the largest one instead of NaN."""
    return x.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)


def turned(states: torch.Tensor, rotary: Rotary, norm: Norm | None) -> torch.Tensor:
    """Applies the norm and the rotary embedding to queries or keys [heads, T, D]."""
    if norm is not None:
        states = rms_norm(states, norm.weight, norm.offset, norm.eps)
    return rotated(states, rotary.cosines, rotary.sines)


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotates [heads, T, D] by angles [T, D] whose halves are equal. Pairs are (i, i + D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


# As a share of the largest value. In float32 two correct computations differ in the last bits; in half precision they round at
# different places. A different formula is far off in both.
EXACT = 1e-4
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


def agrees(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None, within: float = 1.0) -> bool:
    allowed = within * (tolerance or ROUNDED.get(theirs.dtype, EXACT))
    return error_of(ours, theirs) <= allowed


def error_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    if ours.shape != theirs.shape:
        return float("inf")
    error = (ours.float() - theirs.float()).abs().max().item()
    return float(error / max(theirs.float().abs().max().item(), 1e-6))


def replace_forward(module: torch.nn.Module, piece: Piece) -> None:
    module.__dict__["forward"] = piece


class _Waiting(threading.local):
    rotary: tuple[torch.Tensor, torch.Tensor, Rotary] | None = None


_waiting = _Waiting()


def put_off_rotary(query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> None:
    """Leaves it to the attention to which these tensors go next."""
    _waiting.rotary = query, key, rotary


def take_rotary(query: torch.Tensor, key: torch.Tensor) -> Rotary | None:
    """The rotary embedding that was delayed for these tensors; None without one. It is taken once."""
    waiting, _waiting.rotary = _waiting.rotary, None
    if waiting is None:
        return None
    if waiting[0] is not query or waiting[1] is not key:
        raise InternalError("rotary embedding was put off for other tensors than attention got")
    return waiting[2]
