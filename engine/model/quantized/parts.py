"""One rank's part of a quantized matrix: which of its tensors' rows and columns are read, so that the rest stays in the file.

Where a part begins or ends within a group, a block or a packed number, the whole matrix is read, and its part becomes an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tandem.engine.model.quantized.formats import Kind, QuantizedCheckpoint, TensorFacts, dense, kind_of
from tandem.engine.model.shard import MatrixPart
from tandem.engine.model.source import ModelSource
from tandem.engine.model.tensor_files import open_tensors


class CheckpointFiles:
    """Reads parts of a checkpoint's tensors. Files stay open, because a mixture has thousands of tensors in each."""

    def __init__(self, source: ModelSource) -> None:
        self._of = open_tensors(source)

    def read(self, name: str, at: tuple[slice, ...], device: torch.device) -> torch.Tensor:
        found: torch.Tensor = self._of[name].get_slice(name)[at if at else ...]
        return found.to(device)


Read = Callable[[str, tuple[slice, ...]], torch.Tensor]
"""Reads some rows and columns of one of a layer's tensors."""

# Along which dimension of a matrix a tensor's axes lie: its outputs or its inputs.
_AXES = {
    "weight": "oi",
    "weight_scale": "oi",
    "weight_scale_inv": "oi",
    "weight_zero_point": "oi",
    "weight_packed": "oi",
    "weight_g_idx": "i",
    "qweight": "io",
    "qzeros": "io",
    "scales": "io",
    "g_idx": "i",
}
_ORDERS = ("g_idx", "weight_g_idx")  # each input's group


class QuantizedPart(nn.Module):
    """Takes a linear layer's place while transformers reads the other weights. It has the whole layer's sizes and no tensors."""

    def __init__(
        self, layer: str, facts: Mapping[str, TensorFacts], checkpoint: QuantizedCheckpoint, replaced: nn.Linear
    ) -> None:
        super().__init__()
        self.layer = layer  # its name in the checkpoint
        self.checkpoint = checkpoint
        self.has_bias = replaced.bias is not None
        self.out_features, self.in_features = replaced.out_features, replaced.in_features
        self._facts = facts

    def read(self, files: CheckpointFiles, part: MatrixPart, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a matrix that is this part of the layer's. See `is_ordinary`."""

        def from_file(name: str, at: tuple[slice, ...]) -> torch.Tensor:
            return files.read(f"{self.layer}.{name}", at, device)

        tensors = part_of_matrix(self._facts, self.checkpoint, (self.out_features, self.in_features), part, from_file)
        if "bias" in self._facts:
            bias = from_file("bias", (slice(None),))
            # Tools that write GPTQ add zeros.
            if self.has_bias or bool(bias.any()):
                tensors["bias"] = bias[part.outputs.start : part.outputs.stop]
        return tensors


def part_of_matrix(
    facts: Mapping[str, TensorFacts],
    checkpoint: QuantizedCheckpoint,
    size: tuple[int, int],
    part: MatrixPart,
    read: Read,
) -> dict[str, torch.Tensor]:
    """`size` is the whole matrix's: its outputs and inputs."""
    kind = kind_of(facts, checkpoint.method)
    names = [name for name in facts if name in _AXES]
    ranges = {"o": part.outputs, "i": part.inputs}
    totals = dict(zip("oi", size, strict=True))
    whole = {name: tuple(slice(None) for _ in facts[name].shape) for name in facts}
    cut = {axis for axis, total in totals.items() if len(ranges[axis]) < total}
    order = next((name for name in _ORDERS if name in facts), None)
    shuffled = order is not None and "i" in cut and not is_in_order(read(order, whole[order]), _groups(facts))
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if name == order and "i" in cut and not shuffled:
            continue  # the part's groups are in order, too, and counted from its own first one
        at: list[slice] = []
        for axis, length in zip(_AXES[name], facts[name].shape, strict=False):
            if axis not in cut or length == 1 or (shuffled and axis == "i" and name in _OF_GROUPS):
                at.append(slice(0, length))
                continue
            unit = _unit(kind, name, totals[axis], length, checkpoint.block["oi".index(axis)])
            first, end = ranges[axis].start, ranges[axis].stop
            if first % unit or (end % unit and end != totals[axis]):
                return _ordinary_part(names, whole, facts, checkpoint, part, read)
            at.append(slice(first // unit, -(-end // unit)))
        tensors[name] = read(name, tuple(at))
    if "weight_shape" in facts:
        tensors["weight_shape"] = torch.tensor([len(part.outputs), len(part.inputs)])
    return tensors


# A shuffled matrix's inputs are in any of these tensors' groups.
_OF_GROUPS = ("qzeros", "scales", "weight_scale", "weight_zero_point")


def _unit(kind: Kind, name: str, total: int, length: int, block: int) -> int:
    """How many outputs or inputs share an element of an axis with this length."""
    if kind is Kind.FP8 and name != "weight" and length != total:
        return block  # the last one may be incomplete
    return total // length


def _groups(facts: Mapping[str, TensorFacts]) -> int:
    return facts["scales"].shape[0] if "scales" in facts else facts["weight_scale"].shape[1]


def is_in_order(groups: torch.Tensor, count: int) -> bool:
    """Whether the inputs' groups, of which there are `count`, follow each other."""
    inputs = len(groups)
    each = torch.arange(inputs, device=groups.device) // max(1, inputs // count)
    return torch.equal(groups.long(), each)


def _ordinary_part(
    names: list[str],
    whole: Mapping[str, tuple[slice, ...]],
    facts: Mapping[str, TensorFacts],
    checkpoint: QuantizedCheckpoint,
    part: MatrixPart,
    read: Read,
) -> dict[str, torch.Tensor]:
    tensors = {name: read(name, whole[name]) for name in (*names, "weight_shape") if name in facts}
    rows, columns = (slice(each.start, each.stop) for each in (part.outputs, part.inputs))
    return {"weight": dense(tensors, checkpoint)[rows, columns]}


def is_ordinary(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the part is an ordinary matrix, because it could not be cut as it lies in the checkpoint."""
    return "weight" in tensors and tensors["weight"].dtype is torch.float32
