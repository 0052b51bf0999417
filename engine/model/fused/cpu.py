"""The pieces by the CPU kernels: weights are packed once, and each piece is one call of the library."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int32
from typing import TYPE_CHECKING, Any

import torch

from tandem.engine.model.fused import tape
from tandem.engine.model.kernel_linear import KernelLinear
from tandem.engine.model.native.forward import checked, cores_for, numbered
from tandem.engine.model.pieces import Activation, Matrix, NotOneMatrix, Piece
from tandem.kernels import library
from tandem.kernels.compiler import BuildFailed
from tandem.kernels.library import Weights

if TYPE_CHECKING:
    from tandem.engine.model.adapters import UpdatedLayer

_DTYPES = (torch.float32, torch.bfloat16)
_ACTIVATIONS = {Activation.SILU: library.SILU, Activation.GELU_TANH: library.GELU_TANH}


def cpu_pieces(dtype: torch.dtype, threads: int) -> CpuPieces | None:
    """The pieces for this dtype; None if the kernels do not run here, do not know the dtype, or are slow."""
    try:
        found = library.instruction_set(dtype) if dtype in _DTYPES else None
    except BuildFailed:
        return None
    # Without vector instructions for this processor the library is slower than torch.
    return None if found in (None, "portable") else CpuPieces(dtype, threads)


class _Updates:
    """The adapters' updates of a product's columns."""

    def __init__(self, columns: list[tuple[UpdatedLayer, int, int, int]]) -> None:
        """`columns` are (layer, its first column, its end, the first column in the product)."""
        self._columns = columns

    @classmethod
    def of(cls, matrices: Sequence[Matrix]) -> _Updates:
        columns, start = [], 0
        for matrix in matrices:
            outputs = matrix.weight.shape[0] if (kernel := _kernel(matrix)) is None else kernel.outputs
            if matrix.adapted is not None:
                columns.append((matrix.adapted, matrix.first, matrix.first + outputs, start))
            start += outputs
        return cls(columns)

    def now(self) -> tuple[library.RowUpdates | None, tuple[torch.Tensor, ...]]:
        """Returns this step's updates for a call, and the tensors that must outlive the call besides the layers' stacks. None without
        updates."""
        columns = [each for each in self._columns if each[0].down is not None]
        if not columns or (slots := columns[0][0].rows.wanted) is None:
            return None, ()
        updates = (library.RowUpdate * len(columns))()
        for update, (layer, begin, end, first) in zip(updates, columns, strict=True):
            assert layer.down is not None
            assert layer.up is not None
            update.down, update.up = layer.down.data_ptr(), layer.up.data_ptr()
            update.inputs, update.vectors = layer.inputs, layer.up.shape[1]
            update.begin, update.end, update.first = begin, end, first
        rows = columns[0][0].rows
        found = library.RowUpdates(updates, slots.data_ptr(), len(columns), rows.slots, rows.rank)
        return found, (slots,)


class CpuPieces:
    """Owns the packed weights and the threads that use them. It must live as long as its pieces. One piece runs at a time."""

    copies = True
    adds_updates = True
    turns_norms = False
    norms_add = False

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self.native = library.load()
        cores = cores_for(threads)
        made = self.native.tandem_operations_create(
            library.DTYPES[dtype], (c_int32 * len(cores))(*cores), len(cores), b""
        )
        checked(0 if made else -1)
        self.handle: int = made
        self._close = weakref.finalize(self, self.native.tandem_operations_destroy, made)
        self._close.atexit = False  # at exit a step may be running in another thread
        self.dtype = dtype
        self.lanes: int = self.native.tandem_lanes(made)

    @property
    def meetings(self) -> int:
        """How often the threads have synchronized so far."""
        met: int = self.native.tandem_meetings(self.handle)
        return met

    def product(self, matrices: Sequence[Matrix]) -> Piece:
        number, outputs, inputs = self._add(matrices, interleave=False)
        native, added = self.native.tandem_linear_rows, _Updates.of(matrices)

        def run(x: torch.Tensor) -> torch.Tensor:
            rows = in_rows(x, inputs)
            out = rows.new_empty((rows.shape[0], outputs))
            updates, kept = added.now()
            pointers = byref(described(rows)), byref(described(out)), _pointer(updates)
            tape.call(native, (self.handle, number, *pointers), (rows, out, *kept))
            return out.view(*x.shape[:-1], outputs)

        return run

    def gated(self, gate: Matrix, up: Matrix, down: Matrix, activation: Activation) -> Piece:
        first, _, inputs = self._add((gate, up), interleave=True)
        second, outputs, _ = self._add((down,), interleave=False)
        native, kind = self.native.tandem_gated_rows, _ACTIVATIONS[activation]
        added, then_added = _Updates.of((gate, up)), _Updates.of((down,))

        def run(x: torch.Tensor) -> torch.Tensor:
            rows = in_rows(x, inputs)
            out = rows.new_empty((rows.shape[0], outputs))
            (updates, kept), (then, also_kept) = added.now(), then_added.now()
            pointers = byref(described(rows)), byref(described(out)), _pointer(updates), _pointer(then)
            tape.call(native, (self.handle, first, second, kind, *pointers), (rows, out, *kept, *also_kept))
            return out.view(*x.shape[:-1], outputs)

        return run

    def norm(self, weight: torch.Tensor, offset: float, eps: float) -> Piece:
        weight = weight.contiguous()
        width = weight.shape[0]
        number = numbered(self.native.tandem_add_norm(self.handle, byref(library.part(weight)), offset, eps))
        native = self.native.tandem_norm_rows

        def run(x: torch.Tensor) -> torch.Tensor:
            rows = in_rows(x, width)
            out = torch.empty(rows.shape, dtype=rows.dtype)
            tape.call(native, (self.handle, number, byref(described(rows)), byref(described(out))), (rows, out))
            return out.view(x.shape)

        return run

    def update(self, layer: UpdatedLayer, x: torch.Tensor, out: torch.Tensor) -> None:
        """Adds to each row of `out` the update that its adapter computes from the same row of `x`."""
        rows, into = in_rows(x, layer.inputs), in_rows(out, layer.outputs)
        updates, kept = _Updates([(layer, 0, layer.outputs, 0)]).now()
        arguments = (self.handle, _pointer(updates), byref(described(rows)), byref(described(into)))
        tape.call(self.native.tandem_update_rows, arguments, (rows, into, *kept))

    def _add(self, matrices: Sequence[Matrix], *, interleave: bool) -> tuple[int, int, int]:
        """Packs the matrices; returns their number in the library, and the outputs and inputs."""
        weights = [_weights(matrix) for matrix in matrices]
        outputs, inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        found = [matrix.bias if (kernel := _kernel(matrix)) is None else kernel.bias for matrix in matrices]
        biases = None
        if any(bias is not None for bias in found):
            biases = [
                torch.zeros(weight.shape[0]) if bias is None else bias.contiguous()
                for bias, weight in zip(found, weights, strict=True)
            ]
        number = numbered(
            self.native.tandem_add_linear(
                self.handle, _parts(weights), _parts(biases), len(weights), inputs, interleave
            )
        )
        return number, outputs, inputs


def _kernel(matrix: Matrix) -> KernelLinear | None:
    return matrix.kernel if isinstance(matrix.kernel, KernelLinear) else None


def _weights(matrix: Matrix) -> Weights:
    if (kernel := _kernel(matrix)) is None:
        return matrix.weight.contiguous()
    if (blocks := kernel.blocks()) is None:
        raise NotOneMatrix
    return blocks


def in_rows(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """[..., width] as [rows, width], a view if possible."""
    rows = tensor.reshape(-1, width)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def described(rows: torch.Tensor) -> library.KernelRows:
    """Describes rows to the library by a pointer into the tensor, which must outlive the call."""
    count, width = rows.shape
    return library.KernelRows(rows.data_ptr(), count, rows.stride(0), width, library.DTYPES[rows.dtype])


def _pointer(updates: library.RowUpdates | None) -> Any:
    return None if updates is None else byref(updates)


def _parts(tensors: Sequence[Weights] | None) -> ctypes.Array[library.WeightRows] | None:
    return None if tensors is None else (library.WeightRows * len(tensors))(*map(library.part, tensors))
