"""How long a model's context is, by its configuration."""

from __future__ import annotations

import logging
from typing import Any

from tandem.base.errors import ConfigurationError

log = logging.getLogger(__name__)


def context_length(config: Any, wanted: int | None) -> int:
    """The context length: `wanted`, or without it what the model was trained for. Raises ConfigurationError for more than that."""
    text = config.get_text_config()
    trained: int | None = getattr(text, "max_position_embeddings", None)
    trained = _yarn_range(text, trained) or trained
    if getattr(text, "is_encoder_decoder", False):
        # What the encoder reads, and what the decoder writes. T5's positions have no end: it may be asked for more than it was trained for.
        if trained is None and (each := getattr(text, "n_positions", None)):
            wanted = wanted or 2 * each
        trained = trained and 2 * trained
    constant = _constant_rotary_range(text)
    if constant is not None and trained is not None and constant < trained:
        log.warning(
            "%s: its rotary embedding changes with the longest request of a batch beyond %d tokens; "
            "requests are limited to that",
            config.model_type,
            constant,
        )
        trained = constant
    if trained is None:
        if wanted is None:
            raise ConfigurationError("the model does not say how long its context is: set --max-model-len")
        return wanted
    if wanted is not None and wanted > trained:
        raise ConfigurationError(
            f"max_model_len is {wanted}, and the model's context is {trained} tokens: ask for at most {trained} (--max-model-len), or "
            "extend the model by the rope_parameters of its config.json"
        )
    return wanted or int(trained)


def _yarn_range(text: Any, trained: int | None) -> int | None:
    """The length to which YaRN extends a model whose configuration still has the length before it; some models are published like
    that. None if this is not one."""
    rope = getattr(text, "rope_parameters", None) or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "yarn" or not factor or original != trained:
        return None
    return int(original * factor)


def _constant_rotary_range(text: Any) -> int | None:
    """The length up to which the rotary frequencies depend only on the position; None without a limit.

    Beyond it, the types below choose frequencies by the longest sequence in the batch, so one request would change another's answer.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    # Models with several kinds of layers have parameters for each kind.
    variants = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for variant in variants:
        kind = variant.get("rope_type", "default")
        original = variant.get("original_max_position_embeddings")
        original = original or getattr(text, "original_max_position_embeddings", None)
        if kind == "longrope":
            return original
        if kind == "dynamic":
            return original or getattr(text, "max_position_embeddings", None)
    return None
