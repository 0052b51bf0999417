"""How tokens are sampled for a request that does not say: as the model's makers recommend, or as OpenAI does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tandem.router.config import RouterConfig, SamplingDefaults
from tandem.router.text.tokenizer import read_json
from tandem.wire.errors import ConfigurationError

FILE = "generation_config.json"


class Defaults(msgspec.Struct, frozen=True):
    """OpenAI's, and off for what OpenAI does not have."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # of an answer; a request may ask for more


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "max_new_tokens": (1, 2**31 - 1),
}


def defaults_of(config: RouterConfig) -> Defaults:
    """Raises ConfigurationError for a value that no request could have either."""
    if config.sampling_defaults is SamplingDefaults.OPENAI:
        return Defaults()
    path = Path(config.tokenizer_path) / FILE
    declared = read_json(path)
    return Defaults(
        **{name: _checked(path, name, value) for name, value in declared.items() if _means(name, value)}
    )


def _means(name: str, value: Any) -> bool:
    return name in _RANGES and value is not None


def _checked(path: Path, name: str, value: Any) -> Any:
    low, high = _RANGES[name]
    whole = name in ("top_k", "max_new_tokens")
    if (
        isinstance(value, bool)
        or not isinstance(value, int if whole else int | float)
        or not low <= value <= high
    ):
        raise ConfigurationError(
            f"{path}: {name} must be a {'whole ' if whole else ''}number from {low} to {high}, not {value!r}; "
            "router.sampling_defaults: openai leaves the file aside"
        )
    if name == "top_k":
        return max(0, value)
    return value if whole else float(value)
