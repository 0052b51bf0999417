"""How a checkpoint may store its weights, other than as plain safetensors. The loader knows each format by its row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from tandem.base.wings import find_wings
from tandem.engine.model.shard import MatrixPart
from tandem.engine.model.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tandem.kernels.library import Weights

ROWS = ("tandem.engine.model.gguf.format", "tandem.engine.model.quantized.format")

PartOf = Callable[[str], MatrixPart]
"""This rank's part of a linear layer, by the layer's name in the model, or of a tensor of experts, by the tensor's name."""


class StoredTensors(Protocol):
    """A checkpoint's weights as the native library computes with them, read without transformers."""

    def take(self, name: str) -> Weights | None:
        """By its name in a checkpoint of safetensors; None if there are none."""

    def rotary(self) -> tuple[torch.Tensor, float]:
        """The inverse frequencies of the rotary embedding, and the factor of its cosines and sines."""

    def refuse_rest(self) -> None:
        """Raises a ConfigurationError if the checkpoint holds weights that were not taken."""


class WeightFormat:
    """One checkpoint's format."""

    uncut = ""  # what it is, and why several ranks cannot cut its matrices; "": they can
    always_has_head = False

    def reads(self, device: torch.device, *, in_parts: bool) -> bool:
        """Whether the format loads this checkpoint. If not, transformers does so by itself."""
        return True

    def compute_dtype(self, stored: Callable[[], torch.dtype]) -> torch.dtype:
        """The dtype to compute in. `stored` finds the checkpoint's own."""
        return stored()

    def plain(self, config: Any) -> Any:
        """The configuration of the same model with ordinary matrices."""
        return config

    def stored_tensors(self, config: Any) -> StoredTensors | None:
        """The weights for the native library; None if it computes with a model that transformers has loaded."""
        return None

    def loading_options(self, config: Any, *, in_parts: bool = False) -> dict[str, Any]:
        """Options for `from_pretrained`. `in_parts`: `finish_loading` will be told which part of each matrix to read."""
        return {}

    def unread(self, keys: list[str], model: PreTrainedModel) -> list[str]:
        """Those of the checkpoint's tensors that `finish_loading` does not read either. Transformers read none of `keys`."""
        return keys

    def finish_loading(
        self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device, part_of: PartOf | None = None
    ) -> None:
        """Makes of the loaded model one that computes. Raises a ConfigurationError for weights that have no place in it."""


class FormatReader(Protocol):
    """A format's module. What takes long to import waits until a checkpoint has the format."""

    def read_config(self, source: ModelSource) -> Any:
        """transformers' configuration, if this format keeps it elsewhere than in config.json; None if not."""

    def weight_format(self, source: ModelSource, config: Any) -> WeightFormat | None:
        """None for a checkpoint in another format. Raises a ConfigurationError for what cannot be computed correctly."""


def _readers() -> list[FormatReader]:
    return [cast("FormatReader", module) for module in find_wings(ROWS)]


def config_of(source: ModelSource) -> Any:
    """The configuration that a format keeps; None if config.json has it."""
    return next((config for each in _readers() if (config := each.read_config(source)) is not None), None)


def weight_format(source: ModelSource, config: Any) -> WeightFormat | None:
    """The checkpoint's format; None for plain safetensors."""
    return next((found for each in _readers() if (found := each.weight_format(source, config)) is not None), None)
