"""What the CPU kernels add for each row's adapter, against the same sums in float64."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.model.fused.cpu import CpuPieces, cpu_pieces
from tandem.wire.errors import InternalError

SIZES = [(64, 64), (576, 1536), (37, 5), (1, 1), (130, 259)]


def pieces(dtype: torch.dtype, threads: int = 2) -> CpuPieces:
    found = cpu_pieces(dtype, threads)
    if found is None:
        pytest.skip("this processor has no vectors that the kernels use")
    return found


def update_of(
    slots: torch.Tensor, rank: int, down: torch.Tensor, up: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    added = torch.zeros(len(x), up.shape[1], dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            own = slice(slot * rank, (slot + 1) * rank)
            added[row] = (x[row].double() @ down[own].double().T) @ up[own].double()
    return added


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rank", [1, 3, 8, 16])
def test_each_row_gets_what_its_own_adapter_adds(
    dtype: torch.dtype, inputs: int, outputs: int, rank: int
) -> None:
    generator = torch.Generator().manual_seed(rank * inputs + outputs)
    down, up = (torch.randn(4 * rank, size, generator=generator).to(dtype) for size in (inputs, outputs))
    for rows in (1, 2, 19):
        slots = torch.randint(-1, 4, (rows,), generator=generator)
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        before = torch.randn(rows, outputs, generator=generator).to(dtype)
        out = before.clone()
        pieces(dtype).update(slots, rank, down, up, x, out)
        added = update_of(slots, rank, down, up, x)
        wanted = before.double() + added
        least = 1e-4 if dtype is torch.float32 else 1e-2
        largest = added.abs().amax(dim=1, keepdim=True) + wanted.abs()
        assert ((out.double() - wanted).abs() <= least * (largest + 1)).all()
        none = slots < 0
        assert torch.equal(out[none], before[none]), "a row without an adapter is left as it was"


def test_a_rows_result_depends_on_nothing_beside_it() -> None:
    generator = torch.Generator().manual_seed(5)
    down, up = (torch.randn(3 * 16, size, generator=generator).bfloat16() for size in (576, 192))
    x, slots = torch.randn(12, 576, generator=generator).bfloat16(), torch.arange(12) % 4 - 1
    together = torch.zeros(12, 192).bfloat16()
    pieces(torch.bfloat16).update(slots, 16, down, up, x, together)
    for threads in (1, 2):
        for row in range(12):
            alone = torch.zeros(1, 192).bfloat16()
            pieces(torch.bfloat16, threads).update(
                slots[row : row + 1], 16, down, up, x[row : row + 1], alone
            )
            assert torch.equal(alone[0], together[row])


def test_rows_of_a_larger_tensor_are_read_where_they_lie() -> None:
    generator = torch.Generator().manual_seed(6)
    down, up = (torch.randn(2 * 4, size, generator=generator) for size in (32, 48))
    wide = torch.randn(5, 96, generator=generator)
    out = torch.zeros(5, 80)
    slots = torch.tensor([0, 1, -1, 1, 0])
    pieces(torch.float32).update(slots, 4, down, up, wide[:, 8:40], out[:, 16:64])
    torch.testing.assert_close(
        out[:, 16:64].double(), update_of(slots, 4, down, up, wide[:, 8:40]), rtol=1e-4, atol=1e-4
    )
    assert not out[:, :16].any()
    assert not out[:, 64:].any()


def test_a_slot_that_is_not_there_is_refused() -> None:
    with pytest.raises(InternalError, match="there is no slot 2"):
        pieces(torch.float32).update(
            torch.tensor([2]),
            4,
            torch.zeros(8, 16),
            torch.zeros(8, 16),
            torch.zeros(1, 16),
            torch.zeros(1, 16),
        )
