"""What the CPU kernels add for each row's adapter, against the same sums in float64."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import byref, c_int32, pointer

import pytest
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.adapters import LayerUpdate
from tandem.engine.model.fused.cpu import CpuPieces, cpu_pieces, described
from tandem.engine.model.lora.rows import AdaptedLayer, StepRows
from tandem.engine.model.pieces import Activation, Matrix, Piece, activate
from tandem.kernels import library
from tests.kernels import probes

SIZES = [(576, 1536), (37, 5), (1, 1), (130, 259)]


def pieces(dtype: torch.dtype, threads: int = 2) -> CpuPieces:
    found = cpu_pieces(dtype, threads)
    if found is None:
        pytest.skip("this processor has no vectors that the kernels use")
    return found


def pieces_of(dtype: torch.dtype, unit: str) -> CpuPieces:
    """As on a processor that has no better unit."""
    kernels = pieces(dtype)
    kernels.handle = kernels.native.tandem_operations_create(
        library.DTYPES[dtype], (c_int32 * 2)(-1, -1), 2, unit.encode()
    )
    weakref.finalize(kernels, kernels.native.tandem_operations_destroy, kernels.handle)
    kernels.lanes = kernels.native.tandem_lanes(kernels.handle)
    return kernels


def a_layer(
    pieces: CpuPieces, inputs: int, outputs: int, updates: Sequence[LayerUpdate | None], rank: int
) -> AdaptedLayer:
    """With one adapter in each slot, None where it does not change the layer."""
    layer = AdaptedLayer((inputs, outputs), StepRows(len(updates), rank, pieces))
    for slot, update in enumerate(updates):
        layer.put(slot, update, torch.empty(0, dtype=pieces.dtype))
    return layer


def some_updates(
    count: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0
) -> list[LayerUpdate]:
    generator = torch.Generator().manual_seed(seed + rank * inputs + outputs)
    return [
        LayerUpdate(
            (torch.randn(rank, inputs, generator=generator) / inputs**0.5).to(dtype),
            torch.randn(outputs, rank, generator=generator).to(dtype),
        )
        for _ in range(count)
    ]


def added_by(slots: torch.Tensor, updates: Sequence[LayerUpdate | None], x: torch.Tensor, outputs: int) -> torch.Tensor:
    added = torch.zeros(len(x), outputs, dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        update = updates[slot] if slot >= 0 else None
        if update is not None:
            added[row] = update.up.double() @ (update.down.double() @ x[row].double())
    return added


def close(ours: torch.Tensor, right: torch.Tensor) -> None:
    tolerance = 2e-5 if ours.dtype is torch.float32 else 1e-2
    assert ((ours.double() - right).abs() <= tolerance * (right.abs().amax() + 1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_each_row_gets_what_its_own_adapter_adds(dtype: torch.dtype, inputs: int, outputs: int, rank: int) -> None:
    kernels = pieces(dtype)
    updates = [None, *some_updates(3, rank, inputs, outputs, dtype)]
    layer = a_layer(kernels, inputs, outputs, updates, rank)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 2, 19):
        layer.rows.wanted = slots = torch.randint(-1, 4, (rows,), generator=generator)
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        before = torch.randn(rows, outputs, generator=generator).to(dtype)
        out = before.clone()
        kernels.update(layer, x, out)
        close(out, before.double() + added_by(slots, updates, x, outputs))
        none = slots < 0
        assert torch.equal(out[none], before[none]), "a row without an adapter is left as it was"


# Parts of a product begin and end within vectors, or with them.
PARTS = [((48, 16, 16), 64), ((37, 5, 70), 33), ((1, 1, 1), 1), ((576, 192, 192), 576)]


@pytest.mark.parametrize(("dtype", "unit"), probes.available())
@pytest.mark.parametrize(("outputs", "inputs"), PARTS)
@pytest.mark.parametrize("rank", [3, 16])
def test_a_joined_product_gets_the_updates_of_its_parts(
    dtype: torch.dtype, unit: str, outputs: tuple[int, ...], inputs: int, rank: int
) -> None:
    kernels = pieces_of(dtype, unit)
    rows = StepRows(2, rank, kernels)
    matrices, adapters = [], []
    for part, size in enumerate(outputs):
        layer = AdaptedLayer((inputs, size), rows)
        weight = (torch.randn(size, inputs) / inputs**0.5).to(dtype)
        matrices.append(Matrix(weight, torch.randn(size).to(dtype), adapted=layer))
        adapters.append(some_updates(2, rank, inputs, size, dtype, seed=part))
        for slot, update in enumerate(adapters[-1]):
            if part != 1:  # which no adapter changes
                layer.put(slot, update, torch.empty(0, dtype=dtype))
    product = kernels.product(matrices)
    plain = kernels.product([Matrix(each.weight, each.bias) for each in matrices])
    for count in (1, 2, 13, 70):
        x, slots = torch.randn(count, inputs).to(dtype), torch.arange(count) % 3 - 1
        rows.wanted = None
        base = plain(x)
        assert torch.equal(product(x), base)
        rows.wanted = slots
        ours, at = product(x), 0
        assert torch.equal(ours[slots < 0], base[slots < 0])
        for part, size in enumerate(outputs):
            added = added_by(slots, adapters[part], x, size) * (part != 1)
            close(ours[:, at : at + size], base[:, at : at + size].double() + added)
            at += size


@pytest.mark.parametrize(("dtype", "unit"), probes.available())
@pytest.mark.parametrize("joined", [False, True], ids=["two layers", "one layer"])
@pytest.mark.parametrize(("inputs", "width"), [(64, 96), (33, 37), (576, 1536)])
def test_a_gated_activation_gets_the_updates_of_its_three_layers(
    dtype: torch.dtype, unit: str, joined: bool, inputs: int, width: int
) -> None:
    """Also where gate and up are halves of one layer, the second first."""
    kernels, rank = pieces_of(dtype, unit), 8
    rows = StepRows(2, rank, kernels)
    generator = torch.Generator().manual_seed(inputs + width)

    def weight(outputs: int, size: int) -> torch.Tensor:
        return (torch.randn(outputs, size, generator=generator) / size**0.5).to(dtype)

    def adapted(outputs: int, size: int) -> tuple[AdaptedLayer, list[LayerUpdate]]:
        layer = AdaptedLayer((size, outputs), rows)
        updates = some_updates(2, rank, size, outputs, dtype)
        for slot, update in enumerate(updates):
            layer.put(slot, update, torch.empty(0, dtype=dtype))
        return layer, updates

    gate, up, down = weight(width, inputs), weight(width, inputs), weight(inputs, width)
    of_down, down_updates = adapted(inputs, width)
    if joined:
        both, updates = adapted(2 * width, inputs)
        first, second = Matrix(gate, None, adapted=both, first=width), Matrix(up, None, adapted=both)
        gates = [LayerUpdate(one.down, one.up[width:]) for one in updates]
        ups = [LayerUpdate(one.down, one.up[:width]) for one in updates]
    else:
        (of_gate, gates), (of_up, ups) = adapted(width, inputs), adapted(width, inputs)
        first, second = Matrix(gate, None, adapted=of_gate), Matrix(up, None, adapted=of_up)
    piece = kernels.gated(first, second, Matrix(down, None, adapted=of_down), Activation.SILU)
    plain = kernels.gated(*(Matrix(each, None) for each in (gate, up, down)), Activation.SILU)  # type: ignore[call-arg]
    for count in (1, 8, 21):
        x, slots = torch.randn(count, inputs, generator=generator).to(dtype), torch.arange(count) % 3 - 1
        rows.wanted = slots
        ours = piece(x)
        assert torch.equal(ours[slots < 0], plain(x)[slots < 0])
        wide = x.double()
        gated = activate(wide @ gate.double().T + added_by(slots, gates, x, width), Activation.SILU) * (
            wide @ up.double().T + added_by(slots, ups, x, width)
        )
        gated = gated.to(dtype)
        close(ours, gated.double() @ down.double().T + added_by(slots, down_updates, gated, inputs))


def test_a_rows_result_depends_on_nothing_beside_it() -> None:
    generator = torch.Generator().manual_seed(5)
    updates = some_updates(3, 16, 576, 192, torch.bfloat16)
    weight = torch.randn(192, 576, generator=generator).bfloat16()
    x, slots = torch.randn(12, 576, generator=generator).bfloat16(), torch.arange(12) % 4 - 1

    def computed(threads: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = pieces(torch.bfloat16, threads)
        layer = a_layer(kernels, 576, 192, updates, 16)
        layer.rows.wanted = slots[rows]
        out = torch.zeros(len(x[rows]), 192).bfloat16()
        kernels.update(layer, x[rows], out)
        return out, kernels.product([Matrix(weight, None, adapted=layer)])(x[rows])

    together = computed(2, slice(None))
    for threads in (1, 2):
        for row in range(12):
            for alone, of_all in zip(computed(threads, slice(row, row + 1)), together, strict=True):
                assert torch.equal(alone[0], of_all[row])


def test_rows_of_a_larger_tensor_are_read_where_they_lie() -> None:
    generator = torch.Generator().manual_seed(6)
    kernels = pieces(torch.float32)
    updates = some_updates(2, 4, 32, 48, torch.float32)
    layer = a_layer(kernels, 32, 48, updates, 4)
    wide = torch.randn(5, 96, generator=generator)
    out = torch.zeros(5, 80)
    layer.rows.wanted = slots = torch.tensor([0, 1, -1, 1, 0])
    kernels.update(layer, wide[:, 8:40], out[:, 16:64])
    close(out[:, 16:64], added_by(slots, updates, wide[:, 8:40], 48))
    assert not out[:, :16].any()
    assert not out[:, 64:].any()


@pytest.mark.parametrize(("dtype", "unit"), probes.available())
@pytest.mark.parametrize(("begin", "end"), [(0, 48), (16, 48), (7, 48), (5, 37), (40, 41)])
def test_rows_get_only_those_columns_of_an_update_that_they_ask_for(
    dtype: torch.dtype, unit: str, begin: int, end: int
) -> None:
    kernels = pieces_of(dtype, unit)
    updates = some_updates(2, 5, 32, 48, dtype)
    layer = a_layer(kernels, 32, 48, updates, 5)
    assert layer.down is not None
    assert layer.up is not None
    generator = torch.Generator().manual_seed(9)
    x, slots = torch.randn(5, 32, generator=generator).to(dtype), torch.tensor([0, 1, -1, 1, 0])
    before = torch.randn(5, end - begin, generator=generator).to(dtype)
    out = before.clone()
    update = library.RowUpdate(layer.down.data_ptr(), layer.up.data_ptr(), 32, layer.up.shape[1], begin, end, 0)
    asked = library.RowUpdates(pointer(update), slots.data_ptr(), 1, 2, 5)
    rows = (byref(described(x)), byref(described(out)))
    assert kernels.native.tandem_update_rows(kernels.handle, byref(asked), *rows) == 0, library.last_error()
    close(out, before.double() + added_by(slots, updates, x, 48)[:, begin:end])


def test_a_slot_that_is_not_there_is_refused() -> None:
    kernels = pieces(torch.float32)
    layer = a_layer(kernels, 16, 16, some_updates(2, 4, 16, 16, torch.float32), 4)
    layer.rows.wanted = torch.tensor([2])
    with pytest.raises(InternalError, match="there is no slot 2"):
        kernels.update(layer, torch.zeros(1, 16), torch.zeros(1, 16))


def test_threads_meet_as_often_with_adapters_as_without() -> None:
    """But for once between the two products of a gated activation."""
    kernels, dtype = pieces(torch.bfloat16), torch.bfloat16
    layer = a_layer(kernels, 64, 64, some_updates(2, 4, 64, 64, dtype), 4)
    matrix = Matrix(torch.randn(64, 64).to(dtype), None, adapted=layer)
    product = kernels.product([matrix])
    gated = kernels.gated(matrix, matrix, matrix, Activation.SILU)
    x = torch.randn(8, 64).to(dtype)

    def meetings(piece: Piece, slots: torch.Tensor | None) -> int:
        layer.rows.wanted, before = slots, kernels.meetings
        piece(x)
        return kernels.meetings - before

    slots = torch.arange(8) % 2
    assert meetings(product, slots) == meetings(product, None) == 4
    assert meetings(gated, slots) == meetings(gated, None) + 1 == 6
