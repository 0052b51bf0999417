"""Refuses a checkpoint with weights that the model did not take, unless they are known to be harmless.

A configuration that describes less than its checkpoint holds makes another model: with fewer layers, or attention without its
biases. That model answers wrongly, and nothing shows it. So every left-over weight must be known to have no effect on text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from tandem.base.errors import ConfigurationError

log = logging.getLogger(__name__)

# The names that architectures give to a decoder's layers.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?|blk)\.(\d+)\.")

_HARMLESS = [
    # Constants in older checkpoints, which follow from the configuration.
    r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$",
    r"(^|\.)rope\.freqs$",
    r"(^|\.)position_ids$",
    r"(^|\.)(attn|attention)\.(masked_)?bias$",
    # Scales of an 8-bit KV cache. Ours is in the model's own dtype, or rounds to FP8 without scales.
    r"\.(self_attn|attn|attention)\.([kv]_proj\.)?[kv]_scale$",
    # Multi-token prediction, which makes drafts (`model.draft: mtp`). The model's output does not need them.
    r"(^|\.)mtp(_layers)?\.",
    # Parts that read images and sound. No request to this model has any.
    r"(^|\.)(vision|visual|audio|speech)(_\w+)?\.",
    r"(^|\.)(multi_modal|mm|image|audio)_projector\.",
    # Heads that read something else than a token from the last layer.
    r"^(v_head|value_head|score|reward_head)\.",
]
_IS_HARMLESS = re.compile("|".join(_HARMLESS))


def refuse_leftovers(name: str, left: Iterable[str], config: Any) -> None:
    """`left` are the names of the checkpoint's tensors that the model did not take. Raises a ConfigurationError for harmful ones, and
    logs the others."""
    left = sorted(left, key=_in_order)
    consequential = [
        tensor for tensor in left if not _IS_HARMLESS.search(tensor) and not is_draft_layer(tensor, config)
    ]
    if consequential:
        raise ConfigurationError(_refusal(name, consequential, num_layers(config)))
    if left:
        log.info("%s: its checkpoint holds weights that text does not need: %s", name, _some(left))


def _refusal(name: str, tensors: list[str], num_layers: int) -> str:
    beyond = [tensor for tensor in tensors if (layer_of(tensor) or 0) >= num_layers]
    if beyond:
        last = max(layer_of(tensor) or 0 for tensor in beyond)
        return (
            f"{name} cannot be served: its checkpoint holds {last + 1} layers, and its configuration says {num_layers}, "
            f"so it would answer without {_some(beyond)}: correct the number of layers (num_hidden_layers in "
            "config.json), or take the checkpoint that the configuration was written for"
        )
    return (
        f"{name} cannot be served: its checkpoint holds weights that a model of its configuration does not have, so it "
        f"would answer without {_some(tensors)}: correct config.json, or take the checkpoint that it was written for"
    )


def num_layers(config: Any) -> int:
    return int(config.get_text_config().num_hidden_layers)


def is_draft_layer(tensor: str, config: Any) -> bool:
    """Whether a tensor belongs to a layer that makes drafts. DeepSeek and related models number these layers after the model's own."""
    drafts = getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 0
    layer, own = layer_of(tensor), num_layers(config)
    return layer is not None and own <= layer < own + drafts


def layer_of(tensor: str) -> int | None:
    found = _LAYER.search(tensor)
    return None if found is None else int(found[1])


def _in_order(tensor: str) -> tuple[int, str]:
    layer = layer_of(tensor)
    return (-1 if layer is None else layer, tensor)


def _some(tensors: list[str]) -> str:
    return ", ".join(tensors[:4]) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")
