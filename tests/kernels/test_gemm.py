"""Matrix products of every unit against torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import probes

Unit = tuple[torch.dtype, str]


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).float()


def activation(unit: Unit, x: torch.Tensor) -> torch.Tensor:
    """As the unit keeps it."""
    return rounded(x, torch.bfloat16) if unit[1] in probes.ROUNDING else x


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m * 10007 + n * 101 + k)
    x = torch.randn(m, k, generator=generator)
    w = torch.randn(n, k, generator=generator).to(dtype) / k**0.5
    return x, w, torch.randn(n, generator=generator)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_every_number_of_rows(unit: Unit) -> None:
    for rows in (1, 2, 5, 11, 12, 13, 15, 16, 17, 31, 32, 33, 48, 64, 70):
        x, w, _ = operands(rows, 96, 80, unit[0])
        expected = activation(unit, x).double() @ w.double().T
        close(probes.gemm(*unit, probes.STORE, x, [w]), expected, 1e-5)


@settings(max_examples=25, deadline=None)
@given(m=st.integers(1, 70), n=st.integers(1, 200), k=st.integers(1, 200))
def test_odd_shapes_with_bias_added_to_what_is_there(unit: Unit, m: int, n: int, k: int) -> None:
    x, w, bias = operands(m, n, k, unit[0])
    y = torch.randn(m, n)
    expected = activation(unit, x).double() @ w.double().T + bias + y
    close(probes.gemm(*unit, probes.ADD, x, [w], [bias], y), expected, 1e-5)


@pytest.mark.parametrize("outputs", [(8, 8), (24, 24), (37, 37), (96, 96)])
@pytest.mark.parametrize("biased", [False, True])
def test_gated_activation(unit: Unit, outputs: tuple[int, int], biased: bool) -> None:
    x, w, bias = operands(21, sum(outputs), 72, unit[0])
    weights, biases = list(w.split(outputs)), list(bias.split(outputs))
    gate, up = (
        activation(unit, x).double() @ part.double().T + (b if biased else 0)
        for part, b in zip(weights, biases, strict=True)
    )
    expected = torch.nn.functional.silu(gate) * up
    actual = probes.gemm(*unit, probes.SILU_MUL, x, weights, biases if biased else None)
    close(actual, expected, 8e-3 if unit[1] in probes.ROUNDING else 1e-5)


def test_fused_parts_lie_one_below_the_other(unit: Unit) -> None:
    x, w, bias = operands(9, 50, 64, unit[0])
    sizes = (30, 7, 13)
    whole = probes.gemm(*unit, probes.STORE, x, [w], [bias])
    fused = probes.gemm(*unit, probes.STORE, x, list(w.split(sizes)), list(bias.split(sizes)))
    assert torch.equal(whole, fused)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_any_checkpoint_dtype(unit: Unit, source: torch.dtype) -> None:
    x, w, _ = operands(4, 33, 65, source)
    expected = activation(unit, x).double() @ rounded(w.float(), unit[0]).double().T
    close(probes.gemm(*unit, probes.STORE, x, [w]), expected, 1e-5)


def test_halves_subnormal_infinite_and_not_a_number_are_read_right(unit: Unit) -> None:
    w = torch.tensor([[6e-8], [-6e-5], [65504.0], [float("inf")], [float("nan")], [-0.0]], dtype=torch.float16)
    actual = probes.gemm(*unit, probes.STORE, torch.ones(1, 1), [w])[0]
    expected = w[:, 0].to(unit[0]).float()
    # Units that multiply bfloat16, like the instructions, take bfloat16 subnormals for zero; these are not.
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)


def test_a_row_does_not_depend_on_the_rows_beside_it(unit: Unit) -> None:
    x, w, bias = operands(64, 100, 300, unit[0])
    together = probes.gemm(*unit, probes.STORE, x, [w], [bias])
    for first, last in [(0, 1), (1, 3), (3, 16), (16, 41), (41, 64)]:
        alone = probes.gemm(*unit, probes.STORE, x[first:last], [w], [bias], threads=4)
        assert torch.equal(alone, together[first:last])


def test_many_rows_are_cut_into_tasks(unit: Unit) -> None:
    x, w, _ = operands(700, 64, 1536, unit[0])
    expected = activation(unit, x).double() @ w.double().T
    close(probes.gemm(*unit, probes.STORE, x, [w], threads=2), expected, 2e-5)


def exponents(kind: str, n: int, k: int) -> torch.Tensor:
    """Weights whose upper bytes are few (as a model's are), many, or all there are."""
    generator = torch.Generator().manual_seed(n * 1009 + k)
    w = torch.randn(n, k, generator=generator)
    if kind == "wide":
        w *= 2.0 ** torch.randint(-40, 40, (n, k), generator=generator)
    if kind == "rare":
        w.view(-1)[:: 2 * k + 7] *= 2.0**30
    return w.bfloat16()


@pytest.mark.parametrize("kind", ["narrow", "rare", "wide"])
def test_compact_weights_are_the_same_weights(unit: Unit, kind: str) -> None:
    """Not a bit differs, wherever the weights that are listed singly lie and however often a panel is used."""
    for n, k in ((32, 32), (70, 100), (96, 1536)):
        w = exponents(kind, n, k)
        for rows in (1, 16, 17, 32, 33, 200):
            x = torch.randn(rows, k)
            plain = probes.gemm(*unit, probes.STORE, x, [w], compact=False)
            assert torch.equal(probes.gemm(*unit, probes.STORE, x, [w], threads=2), plain), rows
