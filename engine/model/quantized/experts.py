"""Experts whose matrices a checkpoint has one by one, and quantized. A model has those of a layer in two tensors, which no kernel here takes
in a quantized form: each matrix becomes an ordinary one when it is loaded.

Transformers joins such matrices while it reads, and knows few of the formats. So it reads none of these: the tensors are taken out of the
model before, and put back when all else is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tandem.engine.model.quantized.formats import QuantizedCheckpoint, dense, kind_of, sizes_of
from tandem.engine.model.quantized.parts import CheckpointFiles, is_ordinary, part_of_matrix
from tandem.engine.model.shard import MatrixPart
from tandem.engine.model.weight_formats import PartOf

GATE_AND_UP, DOWN = "gate_up_proj", "down_proj"
# The names that checkpoints give to an expert's three matrices.
_NAMES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
_EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts\.(\d+)\.(\w+)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts$")

Places = dict[tuple[int, int], str]
"""The names of a layer's matrices in the checkpoint, by the expert and which of its matrices it is."""


def experts_in(checkpoint: QuantizedCheckpoint) -> dict[int, Places]:
    """The quantized experts of each layer."""
    found: dict[int, Places] = {}
    for layer in checkpoint.layers:
        if (place := _place_of(layer)) is not None:
            found.setdefault(place[0], {})[place[1:]] = layer
    return found


def _place_of(layer: str) -> tuple[int, int, int] | None:
    """The number of the model's layer, the expert's, and which of its matrices it is."""
    part = _EXPERT.search(layer)
    return (int(part[1]), int(part[2]), _NAMES[part[3]]) if part is not None and part[3] in _NAMES else None


class UnreadExperts:
    """The experts of one layer, between `take_out` and `put_back`."""

    def __init__(self, places: Places, checkpoint: QuantizedCheckpoint, shape: torch.Size) -> None:
        """`shape`: of the model's tensor with gates and ups, [experts, 2 x inner, hidden]."""
        self.places = places
        self._checkpoint = checkpoint
        self.experts, self.inner, self.hidden = shape[0], shape[1] // 2, shape[2]

    def whole(self, name: str) -> MatrixPart:
        outputs, inputs = (self.inner, self.hidden) if name == GATE_AND_UP else (self.hidden, self.inner)
        return MatrixPart(range(outputs), range(inputs), range(self.experts))

    def read(
        self, name: str, part: MatrixPart, files: CheckpointFiles, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The part of one of the model's two tensors."""
        kinds = (0, 1) if name == GATE_AND_UP else (2,)
        experts, outputs = part.experts or range(self.experts), len(part.outputs)
        made = torch.empty(len(experts), outputs * len(kinds), len(part.inputs), dtype=dtype, device=device)
        for place, expert in enumerate(experts):
            for row, kind in enumerate(kinds):
                found = self._matrix(self.places[expert, kind], name, part, files, device)
                made[place, row * outputs : (row + 1) * outputs] = found
        return made

    def _matrix(
        self, layer: str, name: str, part: MatrixPart, files: CheckpointFiles, device: torch.device
    ) -> torch.Tensor:
        checkpoint = self._checkpoint
        whole, facts = self.whole(name), checkpoint.layers[layer]
        size = len(whole.outputs), len(whole.inputs)
        held = sizes_of(kind_of(facts, checkpoint.method), facts, checkpoint.bits)
        if held is not None and held != size:
            raise ValueError(f"{layer} is {held} in the checkpoint, and {size} by the model's configuration")
        if "bias" in facts and bool(files.read(f"{layer}.bias", (), device).any()):
            raise ValueError(f"{layer} has a bias in the checkpoint, and the model has none")

        def read(tensor: str, at: tuple[slice, ...]) -> torch.Tensor:
            return files.read(f"{layer}.{tensor}", at, device)

        tensors = part_of_matrix(facts, checkpoint, size, part, read)
        return tensors["weight"] if is_ordinary(tensors) else dense(tensors, checkpoint)


def _modules(model: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """The modules that hold a layer's experts, with the layer's number."""
    for name, module in model.named_modules():
        found = _LAYER.search(name)
        if found is not None:
            yield name, int(found[1]), module


def reads(model: nn.Module) -> Callable[[str], bool]:
    """Tells of one of the checkpoint's tensors whether `put_back` reads it. Transformers names tensors as it would have joined them."""
    unread = unread_in(model)
    places = {(layer, *place) for name, layer, _ in _modules(model) if name in unread for place in unread[name].places}

    def is_read(key: str) -> bool:
        parent, _, name = key.rpartition(".")
        return _place_of(parent) in places or (parent in unread and name in (GATE_AND_UP, DOWN))

    return is_read


def unread_in(model: nn.Module) -> dict[str, UnreadExperts]:
    """By the name of the module."""
    held = {name: module.__dict__.get("unread_experts") for name, _, module in _modules(model)}
    return {name: unread for name, unread in held.items() if unread is not None}


def take_out(model: nn.Module, checkpoint: QuantizedCheckpoint) -> None:
    """Raises a ValueError that describes experts that are joined in another way, or of which some are missing."""
    of_layer = experts_in(checkpoint)
    for name, layer, module in _modules(model):
        places = of_layer.get(layer)
        if places is None or isinstance(module, nn.ModuleList):
            continue  # experts that are modules of their own are linear layers like others
        both, down = (module._parameters.get(part) for part in (GATE_AND_UP, DOWN))
        if both is None or down is None or not _are_as_expected(module, both.shape, down.shape):
            raise ValueError(f"the experts of {name} are quantized, and joined in a way that Tandem does not know")
        unread = UnreadExperts(places, checkpoint, both.shape)
        wanted = {(expert, kind) for expert in range(unread.experts) for kind in range(3)}
        if missing := sorted({str(expert) for expert, _ in wanted - places.keys()}):
            raise ValueError(
                f"{name} has experts that are quantized, and some that are not ({', '.join(missing[:8])}), which cannot be one tensor"
            )
        if beyond := places.keys() - wanted:
            held = 1 + max(expert for expert, _ in beyond)
            raise ValueError(f"{name} has {unread.experts} experts by the configuration, and {held} in the checkpoint")
        del module._parameters[GATE_AND_UP], module._parameters[DOWN]
        module.__dict__["unread_experts"] = unread
        module.__dict__["_is_hf_initialized"] = True  # transformers has nothing to fill


def _are_as_expected(module: Any, both: torch.Size, down: torch.Size) -> bool:
    """Whether gates lie before ups, [experts, outputs, inputs], and no biases are added."""
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        return False
    sizes = tuple(getattr(module, size, 0) for size in ("num_experts", "intermediate_dim", "hidden_dim"))
    experts, inner, hidden = sizes
    return (
        len(module._parameters) == 2
        and tuple(both) == (experts, 2 * inner, hidden)
        and tuple(down) == (experts, hidden, inner)
    )


def put_back(
    model: nn.Module, files: CheckpointFiles, dtype: torch.dtype, device: torch.device, part_of: PartOf | None
) -> int:
    """Reads the experts, or this rank's part of them. Returns how many matrices these were. Raises a ValueError that describes one that
    does not fit the model."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    count = 0
    for name, unread in unread_in(model).items():
        module: Any = modules[name]
        kept = range(unread.experts)
        for which in (GATE_AND_UP, DOWN):
            part = unread.whole(which) if part_of is None else part_of(f"{name}.{which}")
            tensor = unread.read(which, part, files, dtype, device)
            module._parameters[which] = nn.Parameter(tensor, requires_grad=False)
            kept = part.experts or kept
        if len(kept) < unread.experts:
            # What transformers sets where it cuts by itself.
            module.num_experts, module._is_expert_parallel = len(kept), True
        del module.__dict__["unread_experts"]
        count += len(unread.places)
    return count
