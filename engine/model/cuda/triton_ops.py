"""Triton kernels, registered as operations of torch, so that torch records, counts and dispatches them like its own. On a CPU the plain
formula runs instead, so that tests can compare the two.

Triton comes with torch's CUDA builds and is imported with the first kernel.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tandem.engine.model.pieces import Activation, Rotary, activate, rms_norm, rotated, to_fp8

_LIBRARY: Any = torch.library.Library("tandem", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float offset, float eps) -> Tensor")
_LIBRARY.define("add_rms_norm(Tensor x, Tensor y, Tensor(a!) total, Tensor weight, float offset, float eps) -> Tensor")
_LIBRARY.define("gated(Tensor x, str activation) -> Tensor")
_LIBRARY.define("product_by_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define(
    "rotate_and_write(Tensor query, Tensor key, Tensor value, Tensor? cosines, Tensor? sines, Tensor? query_norm, "
    "Tensor? key_norm, float offset, float eps, Tensor slots, Tensor(a!) keys, Tensor(b!) values, bool pads) -> Tensor"
)


def norm(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    out: torch.Tensor = torch.ops.tandem.rms_norm(x, weight, offset, eps)
    return out


def add_and_norm(
    x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, offset: float, eps: float
) -> torch.Tensor:
    """Writes x + y to `total`, which is contiguous, and returns its RMSNorm. The sum is rounded as an ordinary sum is."""
    out: torch.Tensor = torch.ops.tandem.add_rms_norm(x, y, total, weight, offset, eps)
    return out


def gated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Maps [..., 2 N] to [..., N]: the activation of the first half, times the second half."""
    out: torch.Tensor = torch.ops.tandem.gated(x, activation.value)
    return out


def product_by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer's product. A row of the result has the same bits whatever rows are beside it, and however many: each number is
    summed along the row in one order, in tiles of one shape."""
    out: torch.Tensor = torch.ops.tandem.product_by_rows(x, weight, bias)
    return out


def rotate_and_write(
    query: torch.Tensor,  # [query heads, T, D]
    key: torch.Tensor,  # [KV heads, T, D]
    value: torch.Tensor,
    rotary: Rotary | None,
    slots: torch.Tensor,  # int64 [T]: block * block size + offset
    keys: torch.Tensor,  # [blocks, KV heads, block size, D], a view of the cache
    values: torch.Tensor,
    *,
    pads: bool,
) -> torch.Tensor:
    """Applies norms and rotary embedding to queries and keys, writes keys and values to the cache, and returns the queries as
    [T, query heads, D]. With `pads` a token whose slot is in the null block writes zeros."""
    angles: tuple[torch.Tensor | None, ...] = (None, None)
    weights: tuple[torch.Tensor | None, ...] = (None, None)
    offset = eps = 0.0
    if rotary is not None:
        angles = rotary.cosines, rotary.sines
        if rotary.query_norm is not None and rotary.key_norm is not None:
            weights = rotary.query_norm.weight, rotary.key_norm.weight
            offset, eps = rotary.query_norm.offset, rotary.query_norm.eps
    out: torch.Tensor = torch.ops.tandem.rotate_and_write(
        query, key, value, *angles, *weights, offset, eps, slots, keys, values, pads
    )
    return out


# --- in torch

_LARGEST_FP8 = 448.0


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    return rms_norm(x, weight, offset, eps)


def _plain_add_and_norm(
    x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, offset: float, eps: float
) -> torch.Tensor:
    torch.add(x, y, out=total)
    return rms_norm(total, weight, offset, eps)


def _plain_gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return activate(first, Activation(activation)) * second


def _plain_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    for row, to in zip(x.reshape(-1, 1, x.shape[-1]), out.view(-1, 1, weight.shape[0]), strict=True):
        to.copy_(F.linear(row, weight, bias))
    return out


def _plain_rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    offset: float,
    eps: float,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pads: bool,
) -> torch.Tensor:
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, query_norm, offset, eps), rms_norm(key, key_norm, offset, eps)
    if cosines is not None and sines is not None:
        query, key = rotated(query, cosines, sines), rotated(key, cosines, sines)
    size = keys.shape[2]
    block, place = slots // size, slots % size
    if pads:
        null = (slots < size)[None, :, None]
        key, value = key.masked_fill(null, 0), value.masked_fill(null, 0)
    if keys.dtype != key.dtype:
        key, value = to_fp8(key), to_fp8(value)
    # Indices on both sides of a slice put the indexed dimension first: [T, heads, D].
    keys[block, :, place] = key.transpose(0, 1)
    values[block, :, place] = value.transpose(0, 1)
    return query.transpose(0, 1).contiguous()


# --- by Triton


def _turning_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def turn_and_write(  # type: ignore[no-untyped-def]
        query, q_head, q_row,
        key, k_head, k_row,
        value, v_head, v_row,
        cosines, sines, angle_row,
        query_norm, key_norm, offset, eps,
        slots, keys, values, block_stride, head_stride, place_stride,
        out, size,
        HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr, PADS: tl.constexpr,
        NORMS: tl.constexpr, LARGEST: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        columns = tl.arange(0, BLOCK)
        there = columns < HALF
        if TURNS:
            c = tl.load(cosines + row * angle_row + columns, mask=there, other=0.0).to(tl.float32)
            s = tl.load(sines + row * angle_row + columns, mask=there, other=0.0).to(tl.float32)
        if head < HEADS:
            at = query + head * q_head + row * q_row + columns
        else:
            at = key + (head - HEADS) * k_head + row * k_row + columns
        first = tl.load(at, mask=there, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
        if NORMS:
            scale = 1.0 / tl.sqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / (2 * HALF) + eps)
            if head < HEADS:  # noqa: SIM108 - in Triton's own language
                weight = query_norm + columns
            else:
                weight = key_norm + columns
            first = first * scale * (tl.load(weight, mask=there, other=0.0).to(tl.float32) + offset)
            second = second * scale * (tl.load(weight + HALF, mask=there, other=0.0).to(tl.float32) + offset)
        if TURNS:
            turned = first * c - second * s
            second = second * c + first * s
            first = turned
        if head < HEADS:
            to = out + (row * HEADS + head) * (2 * HALF) + columns
            tl.store(to, first.to(out.dtype.element_ty), mask=there)
            tl.store(to + HALF, second.to(out.dtype.element_ty), mask=there)
        else:
            slot = tl.load(slots + row)
            place = (slot // size) * block_stride + (slot % size) * place_stride
            place += (head - HEADS).to(tl.int64) * head_stride
            source = value + (head - HEADS) * v_head + row * v_row + columns
            low = tl.load(source, mask=there, other=0.0).to(tl.float32)
            high = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
            if PADS:
                real = slot >= size
                first = tl.where(real, first, 0.0)
                second = tl.where(real, second, 0.0)
                low = tl.where(real, low, 0.0)
                high = tl.where(real, high, 0.0)
            if LARGEST > 0:
                first = tl.minimum(tl.maximum(first, -LARGEST), LARGEST)
                second = tl.minimum(tl.maximum(second, -LARGEST), LARGEST)
                low = tl.minimum(tl.maximum(low, -LARGEST), LARGEST)
                high = tl.minimum(tl.maximum(high, -LARGEST), LARGEST)
            element = keys.dtype.element_ty
            tl.store(keys + place + columns, first.to(element), mask=there)
            tl.store(keys + place + HALF + columns, second.to(element), mask=there)
            tl.store(values + place + columns, low.to(element), mask=there)
            tl.store(values + place + HALF + columns, high.to(element), mask=there)

    return turn_and_write


@functools.cache
def kernels() -> Any:
    """The kernels. Triton is imported here, because it reads their source when they are defined."""
    import triton
    import triton.language as tl

    # Triton compiles other code for a number that is 1 or a multiple of 16. None may depend on how many rows there are, because each
    # code may sum a row in another order.
    @triton.jit(do_not_specialize=["per_outer"])  # type: ignore[untyped-decorator]
    def norm_rows(x, weight, out, outer, inner, per_outer, n, offset, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0)
        columns = tl.arange(0, BLOCK)
        there = columns < n
        at = (row // per_outer) * outer + (row % per_outer) * inner
        v = tl.load(x + at + columns, mask=there, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / n + eps)
        w = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32) + offset
        tl.store(out + row.to(tl.int64) * n + columns, (v * scale * w).to(out.dtype.element_ty), mask=there)

    @triton.jit  # type: ignore[untyped-decorator]
    def add_and_norm_rows(x, y, total, weight, out, n, offset, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        start = tl.program_id(0).to(tl.int64) * n
        columns = tl.arange(0, BLOCK)
        there = columns < n
        one = tl.load(x + start + columns, mask=there, other=0.0).to(tl.float32)
        other = tl.load(y + start + columns, mask=there, other=0.0).to(tl.float32)
        rounded = (one + other).to(total.dtype.element_ty)
        tl.store(total + start + columns, rounded, mask=there)
        v = rounded.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / n + eps)
        w = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32) + offset
        tl.store(out + start + columns, (v * scale * w).to(out.dtype.element_ty), mask=there)

    @triton.jit  # type: ignore[untyped-decorator]
    def gate_rows(x, out, stride, n, GELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = columns < n
        gate = tl.load(x + row * stride + columns, mask=there, other=0.0).to(tl.float32)
        up = tl.load(x + row * stride + n + columns, mask=there, other=0.0).to(tl.float32)
        if GELU:
            passed = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        else:
            passed = gate * tl.sigmoid(gate)
        tl.store(out + row * n + columns, (passed * up).to(out.dtype.element_ty), mask=there)

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
    def product_tiles(  # type: ignore[no-untyped-def]
        x, weight, bias, out, rows, n, k,
        BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, DEPTH)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, k, DEPTH):
            at = start + inner
            left = tl.load(x + row[:, None] * k + at[None], mask=(row < rows)[:, None] & (at < k)[None], other=0.0)
            right = tl.load(
                weight + column[None] * k + at[:, None], mask=(column < n)[None] & (at < k)[:, None], other=0.0
            )
            total = tl.dot(left, right, total)
        if BIAS:
            total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None]
        to = out + row[:, None] * n + column[None]
        tl.store(to, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < n)[None])

    return SimpleNamespace(
        norm_rows=norm_rows,
        product_tiles=product_tiles,
        add_and_norm_rows=add_and_norm_rows,
        gate_rows=gate_rows,
        turn_and_write=_turning_kernel(),
        power=triton.next_power_of_2,
    )


def _launch_norm(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    found = kernels()
    n = x.shape[-1]
    if x.stride(-1) != 1 or (x.dim() > 2 and not x.is_contiguous() and not _two_strides(x)):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    per_outer, outer, inner = 1, n, n
    if not x.is_contiguous():
        per_outer, inner = x.shape[-2], x.stride(-2)
        outer = x.stride(-3) if x.dim() > 2 else 0
    rows = x.numel() // n
    if rows:
        found.norm_rows[(rows,)](x, weight, out, outer, inner, per_outer, n, offset, eps, BLOCK=found.power(n))
    return out


def _launch_add_and_norm(
    x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, offset: float, eps: float
) -> torch.Tensor:
    found = kernels()
    n = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // n
    if rows:
        found.add_and_norm_rows[(rows,)](
            x.contiguous(), y.contiguous(), total, weight, out, n, offset, eps, BLOCK=found.power(n)
        )
    return out


def _two_strides(x: torch.Tensor) -> bool:
    """Whether all dimensions before the last two can be addressed as one, with one stride."""
    return all(x.shape[i] == 1 or x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 3))


def _launch_gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    found = kernels()
    n = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * n)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    block = min(1024, found.power(n))
    if rows.shape[0]:
        found.gate_rows[(rows.shape[0], -(-n // block))](
            rows, out, rows.stride(0), n, GELU=activation == Activation.GELU_TANH.value, BLOCK=block
        )
    return out


# One shape for all products. It suits neither one row nor thousands best.
_TILE = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 64}


def _launch_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found = kernels()
    n, k = weight.shape
    rows = x.reshape(-1, k).contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if count := rows.shape[0]:
        grid = -(-count // _TILE["ROWS"]), -(-n // _TILE["COLUMNS"])
        found.product_tiles[grid](
            rows, weight.contiguous(), weight if bias is None else bias, out, count, n, k,
            BIAS=bias is not None, **_TILE, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


def _launch_rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    offset: float,
    eps: float,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pads: bool,
) -> torch.Tensor:
    found = kernels()
    query, key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (query, key, value))
    heads, tokens, dim = query.shape
    out = query.new_empty(tokens, heads, dim)
    angles = (query, query) if cosines is None or sines is None else (cosines, sines)
    weights = (query, key) if query_norm is None or key_norm is None else (query_norm, key_norm)
    if tokens:
        found.turn_and_write[(tokens, heads + key.shape[0])](
            query, query.stride(0), query.stride(1),
            key, key.stride(0), key.stride(1),
            value, value.stride(0), value.stride(1),
            *angles, angles[0].stride(-2),
            *weights, offset, eps,
            slots, keys, values, keys.stride(0), keys.stride(1), keys.stride(2),
            out, keys.shape[2],
            HEADS=heads, HALF=dim // 2, BLOCK=found.power(dim // 2), TURNS=cosines is not None, PADS=pads,
            NORMS=query_norm is not None, LARGEST=0.0 if keys.dtype == key.dtype else _LARGEST_FP8,
            num_warps=1,  # a program has half a head's elements
        )  # fmt: skip
    return out


for _name, _plain, _launch in (
    ("rms_norm", _plain_norm, _launch_norm),
    ("add_rms_norm", _plain_add_and_norm, _launch_add_and_norm),
    ("gated", _plain_gated, _launch_gated),
    ("product_by_rows", _plain_product, _launch_product),
    ("rotate_and_write", _plain_rotate_and_write, _launch_rotate_and_write),
):
    _LIBRARY.impl(_name, _plain, "CPU")
    _LIBRARY.impl(_name, _launch, "CUDA")
