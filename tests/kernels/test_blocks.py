"""Products with weights in blocks are those with the same weights widened, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from tandem.kernels import library
from tandem.kernels.library import BLOCKS, BlockRows
from tests.kernels import probes
from tests.kernels.block_rows import GGUF, block_rows
from tests.kernels.test_gemm import Unit

KINDS = pytest.mark.parametrize("kind", BLOCKS)


def widened(unit: Unit, weights: BlockRows) -> tuple[torch.dtype, torch.Tensor]:
    """The weights that a unit computes with, and the dtype in which it keeps these exactly."""
    dtype = torch.bfloat16 if unit[1] in probes.ROUNDING else torch.float32
    return dtype, library.widen(weights, dtype)


def defined(rows: BlockRows) -> torch.Tensor:
    """The weights by the format's own definition."""
    if rows.kind in GGUF:
        return torch.from_numpy(dequantize(rows.data, gguf.GGMLQuantizationType[rows.kind]))
    blocks = rows.data.reshape(-1, BLOCKS[rows.kind].num_bytes)
    scales, zeros = (blocks[:, :4].copy().view("<f4"), blocks[:, 4:6].copy().view("<i2"))
    quants = blocks[:, 6:]
    if rows.kind.startswith("I4"):
        halves = quants.reshape(-1, 16)
        quants = np.concatenate([halves & 15, halves >> 4], axis=1).reshape(len(blocks), -1)
    else:
        quants = quants.view(np.int8)
    return torch.from_numpy((quants.astype(np.float32) - zeros) * scales).view(rows.shape)


@KINDS
def test_a_blocks_weights_are_those_of_the_format(kind: str) -> None:
    rows = block_rows(kind, 5, 512)
    expected = defined(rows)
    assert rows.shape == (5, 512)
    assert torch.equal(library.widen(rows, torch.float32), expected)
    assert torch.equal(library.widen(rows, torch.bfloat16), expected.bfloat16())


@KINDS
def test_products_have_the_bits_of_widened_weights(unit: Unit, kind: str) -> None:
    for outputs, inputs in ((32, 256), (75, 768)):
        weights = block_rows(kind, outputs, inputs)
        dtype, wide = widened(unit, weights)
        for rows in (1, 2, 5, 12, 13, 33, 200):
            x = torch.randn(rows, inputs)
            expected = probes.gemm(dtype, unit[1], probes.STORE, x, [wide])
            assert expected.isfinite().all()
            assert torch.equal(probes.gemm(*unit, probes.STORE, x, [weights], threads=2), expected), rows


@KINDS
def test_fused_and_gated_products_too(unit: Unit, kind: str) -> None:
    x = torch.randn(9, 256)
    parts = [block_rows(kind, 48, 256, seed) for seed in range(2)]
    wide = [widened(unit, part)[1] for part in parts]
    dtype = wide[0].dtype
    for how in (probes.STORE, probes.SILU_MUL):
        expected = probes.gemm(dtype, unit[1], how, x, wide)
        assert torch.equal(probes.gemm(*unit, how, x, parts), expected)


def test_parts_of_several_kinds_are_widened(unit: Unit) -> None:
    x = torch.randn(3, 256)
    parts = [block_rows("Q4_K", 20, 256), block_rows("Q6_K", 7, 256), torch.randn(30, 256)]
    wide = [library.widen(p, unit[0]) if isinstance(p, BlockRows) else p for p in parts]
    expected = probes.gemm(*unit, probes.STORE, x, wide)
    assert torch.equal(probes.gemm(*unit, probes.STORE, x, parts), expected)


def test_a_scale_that_is_no_number_is_not_hidden(unit: Unit) -> None:
    rows = block_rows("Q4_1", 32, 32)
    rows.data[3, :2] = 255
    found = probes.gemm(*unit, probes.STORE, torch.ones(1, 32), [rows])[0]
    assert found[3].isnan()
    assert found.isnan().sum() == 1
