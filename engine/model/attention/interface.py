"""How a transformers model reaches the paged cache: an attention function registered under names of ours.

Transformers builds no mask for an implementation that it knows no mask function for: under PAGED the model passes
None, and the paged step decides by itself who sees what. Under PROBED it hands over the very mask that its own
eager attention would get.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask

from tandem.wire.errors import InternalError

if TYPE_CHECKING:
    import torch

    from tandem.engine.model.decode_inputs import DecodeInputs
    from tandem.engine.model.fused.pieces import Rotary
    from tandem.engine.model.runner import Batch, HostBatch


PAGED = "tandem_paged"
PROBED = "tandem_probed"

AttentionFunction = Callable[..., tuple[torch.Tensor, None]]
"""(module, query, key, value, attention_mask, **kwargs), as transformers calls it."""


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Under which name the model looks attention up from here on, and how its masks are made. Older architectures attend by code of
    their own whatever the name is, and transformers would leave their masks as they are."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = name


class _Current(threading.local):
    function: AttentionFunction | None = None


_current = _Current()


@contextmanager
def attention_through(function: AttentionFunction) -> Iterator[None]:
    """Models that run in this thread meanwhile attend through `function`. Not to be nested."""
    _current.function = function
    try:
        yield
    finally:
        _current.function = None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    if _current.function is None:
        raise InternalError("a model with paged attention was run outside of an engine's step")
    return _current.function(module, query, key, value, attention_mask, **kwargs)


def attention_options(module: torch.nn.Module, query: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a layer's call says besides queries, keys and values, as `attend` takes it."""
    scale = kwargs.get("scaling")
    return {
        "scale": query.shape[-1] ** -0.5 if scale is None else float(scale),
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
    }


def own_eager(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, Any]] | None:
    """The reference that the module's own source file gives."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


MaskRule = Callable[..., torch.Tensor]
"""(batch, head, position, key): may it be seen. All are tensors that broadcast."""


def probed_mask(*, mask_function: MaskRule = causal_mask_function, **options: object) -> torch.Tensor | None:
    mask: torch.Tensor | None = eager_mask(mask_function=mask_function, **options)
    if mask is not None:
        mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


def rule_of(mask: torch.Tensor | None) -> MaskRule | None:
    """By which rule transformers made a mask under PROBED; None if it is not transformers' own."""
    return getattr(mask, "rule", None)


AttentionInterface.register(PAGED, _attention)
AttentionInterface.register(PROBED, _attention)
AttentionMaskInterface.register(PROBED, probed_mask)


class AttentionStep(Protocol):
    """One step's attention. `attend` is called once per layer, in order."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [query heads, T, D]
        key: torch.Tensor,  # [KV heads, T, D]
        value: torch.Tensor,  # [KV heads, T, DV]
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        rotary: Rotary | None = None,
        latent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes this step's keys and values, and returns [T, query heads, DV]. With `rotary`, this is done with queries and
        keys first. `latent` [T, latent and rotary part] is what the layer keeps in their place, if it does."""
        ...


class FixedAttention(Protocol):
    """Attention of decode steps of one shape, for a step that is recorded once and replayed."""

    def prepare(self, host: HostBatch | None) -> None:
        """What a replay needs beside its inputs; called before each one, and not recorded. None: all rows pad."""
        ...

    def begin(self) -> AttentionStep:
        """Called while the step is recorded. All that it computes follows from the inputs' tensors, on the device."""
        ...


class PagedAttention(Protocol):
    """One model's attention."""

    @property
    def reads_tables(self) -> bool:
        """Whether a fixed step reads block tables from its inputs: then their width is part of its shape."""
        ...

    def begin(self, batch: Batch) -> AttentionStep: ...
    def fixed(self, inputs: DecodeInputs) -> FixedAttention: ...
