"""Connects transformers models to the paged cache: registers our attention function with transformers, under two names.

Transformers builds no mask for an implementation without a mask function. So under PAGED the model passes None, and the paged step
decides which keys a row may see. Under PROBED the model passes the mask that its own eager attention would get.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask

from tandem.base.errors import InternalError

if TYPE_CHECKING:
    import torch

    from tandem.engine.model.pieces import Rotary
    from tandem.engine.model.runner import Batch


PAGED = "tandem_paged"
PROBED = "tandem_probed"

AttentionFunction = Callable[..., tuple[torch.Tensor, None]]
"""(module, query, key, value, attention_mask, **kwargs), as transformers calls it."""


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Sets the name by which the model looks up attention, and with it how its masks are made. Older architectures attend by their own
    code whatever the name is, and transformers would not change their masks."""
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
    """Inside, models that run in this thread attend through `function`. It must not be nested."""
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
    """The options of a layer's attention call, besides queries, keys and values, as `attend` takes them."""
    scale = kwargs.get("scaling")
    return {
        "scale": query.shape[-1] ** -0.5 if scale is None else float(scale),
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
    }


def own_eager(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, Any]] | None:
    """The eager attention in the module's own source file, used as the reference; None if it has none."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


MaskRule = Callable[..., torch.Tensor]
"""(batch, head, position, key) -> whether the position may see the key. All are tensors that broadcast."""


def probed_mask(*, mask_function: MaskRule = causal_mask_function, **options: object) -> torch.Tensor | None:
    mask: torch.Tensor | None = eager_mask(mask_function=mask_function, **options)
    if mask is not None:
        mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


def rule_of(mask: torch.Tensor | None) -> MaskRule | None:
    """The rule by which transformers made a mask under PROBED; None if transformers did not make it."""
    return getattr(mask, "rule", None)


AttentionInterface.register(PAGED, _attention)
AttentionInterface.register(PROBED, _attention)
AttentionMaskInterface.register(PROBED, probed_mask)


class AttentionCall(NamedTuple):
    """What a layer's call of attention asks for besides queries, keys and values."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    rotary: Rotary | None = None  # to be applied to queries and keys first
    latent: torch.Tensor | None = None  # [T, latent and rotary part], kept instead of keys and values


class AttentionStep(Protocol):
    """One step's attention. `attend` is called once per layer, in order."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [query heads, T, D]
        key: torch.Tensor,  # [KV heads, T, D]
        value: torch.Tensor,  # [KV heads, T, DV]
        how: AttentionCall,
    ) -> torch.Tensor:
        """Writes this step's keys and values, and returns [T, query heads, DV]."""


class PagedAttention(Protocol):
    """One model's attention."""

    def begin(self, batch: Batch) -> AttentionStep: ...
