"""Reads a LoRA adapter as PEFT writes it: a folder with adapter_config.json and adapter_model.safetensors.

An adapter that needs more than updates of linear layers is refused, because it would answer wrongly without an error. Whether it fits
the model is the engine's to say.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from tandem.base.errors import ConfigurationError
from tandem.engine.model.peft_patterns import Pattern, try_patterns
from tandem.wire.adapters import MISTAKES_SHOWN

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
ALL_LINEAR = "all-linear"
# How the configuration's patterns are matched with a layer's name.
_NUMBERED, _NAMED = r".*\.{}\.(\d+)\.", r"(.*\.)?({})$"
# These initialisations change the base model's own weights, and the adapter is correct only with the changed ones.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class PeftConfig(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that decide what the adapter computes. All others only concern training."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    bias: str = "none"
    use_dora: bool = False
    lora_bias: bool = False
    use_qalora: bool = False
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    alora_invocation_tokens: list[int] | None = None
    init_lora_weights: bool | str | None = True

    def unsupported(self) -> str | None:
        """Why this adapter cannot be served, and what to do about it; None if it can."""
        if self.peft_type != "LORA":
            return f"its peft_type is {self.peft_type}, and only LORA is served"
        if self.use_dora:
            return "it uses DoRA (use_dora): merge it into the model's weights"
        if self.bias != "none" or self.lora_bias:
            return (
                "it changes biases (bias, lora_bias): train it with bias 'none', or merge it into the model's weights"
            )
        if self.modules_to_save:
            return (
                f"it holds whole modules (modules_to_save: {', '.join(self.modules_to_save[:4])}): train it without them, "
                "or merge it into the model's weights"
            )
        if self.use_qalora or self.target_parameters or self.layer_replication:
            return "it uses one of use_qalora, target_parameters and layer_replication: only updates of linear layers are served"
        if self.trainable_token_indices or self.alora_invocation_tokens:
            return "it changes single tokens, or begins at some (trainable_token_indices, alora_invocation_tokens): merge it"
        how = self.init_lora_weights
        if isinstance(how, str) and how.lower().startswith(_CHANGES_BASE):
            return (
                f"it was trained beside changed weights of the model (init_lora_weights: {how}): save it with PEFT's "
                "path_initial_model_for_weight_conversion"
            )
        if not 0 < self.r <= 1 << 16 or not all(0 < rank <= 1 << 16 for rank in self.rank_pattern.values()):
            return f"its rank r is {self.r}, with rank_pattern {self.rank_pattern}: each must be at least 1"
        return None

    def targets(self, layer: str) -> bool:
        """Whether the adapter changes this layer, by PEFT's rules."""
        if self.target_modules is None or self.target_modules == ALL_LINEAR:
            return True
        if _named(self.exclude_modules, layer) or not _named(self.target_modules, layer):
            return False
        if self.layers_to_transform is None or isinstance(self.target_modules, str):
            return True
        number = self._number_of(layer)
        wanted = self.layers_to_transform
        return number is not None and number in ([wanted] if isinstance(wanted, int) else wanted)

    def _number_of(self, layer: str) -> int | None:
        for pattern in self._layers_patterns or [r"[^.]*"]:
            if found := re.match(_NUMBERED.format(pattern), layer):
                return int(found[1])
        return None

    @property
    def _layers_patterns(self) -> list[str]:
        return [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern or []

    @property
    def patterns(self) -> list[Pattern]:
        """What is matched with layers' names as regular expressions."""
        whole = [names for names in (self.target_modules, self.exclude_modules) if isinstance(names, str)]
        begun = [_NUMBERED.format(each) for each in self._layers_patterns]
        begun += [_NAMED.format(each) for each in {*self.rank_pattern, *self.alpha_pattern}]
        return [*(("fullmatch", each) for each in whole if each != ALL_LINEAR), *(("match", each) for each in begun)]

    def scale(self, layer: str) -> float:
        rank = self.rank(layer)
        alpha = _by_pattern(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, layer: str) -> int:
        return int(_by_pattern(self.rank_pattern, layer, self.r))


def _named(names: str | list[str] | None, layer: str) -> bool:
    if names is None:
        return False
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, float], layer: str, otherwise: float) -> float:
    for pattern, value in patterns.items():
        if re.match(_NAMED.format(pattern), layer):
            return value
    return otherwise


class LayerPair(NamedTuple):
    """An update before its scale."""

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank]


class PeftFolder(msgspec.Struct, frozen=True):
    about: str  # what errors call it
    config: PeftConfig
    config_file: bytes
    weights_file: bytes
    digest: str  # of the configuration's meaning, and of the weights
    pairs: dict[str, LayerPair]  # by the layer's name


def read_peft_folder(name: str, folder: Path, max_rank: int, layers: Collection[str] = ()) -> PeftFolder:
    """Raises ConfigurationError for an adapter that no model can have, or whose rank is above `max_rank`. `layers`: the model's own, as far
    as they are known."""
    about = f"the adapter {name!r} ({folder})"
    config_file, config = _read_config(about, folder)
    if (reason := config.unsupported()) is not None:
        raise ConfigurationError(f"{about} cannot be served: {reason}")
    if (highest := max((config.r, *config.rank_pattern.values()))) > max_rank:
        raise ConfigurationError(
            f"{about} has rank {highest}, and model.max_lora_rank is {max_rank}: raise it to {highest}"
        )
    weights = _read_weights(about, folder)
    try:
        tensors = load_tensors(weights)
    except SafetensorError as error:
        raise ConfigurationError(f"{about}: {WEIGHTS_FILE} is damaged or cut short: {error}") from error
    pairs = _pairs(about, tensors)
    try_patterns(about, config.patterns, {*pairs, *layers})
    try:
        _check_config(about, config, pairs)
    except re.error as error:
        raise ConfigurationError(f"{about}: a pattern in {CONFIG_FILE} is no regular expression: {error}") from error
    # The configuration counts by its meaning, without who made it and where.
    meaning = json.dumps(msgspec.to_builtins(config), sort_keys=True).encode()
    digest = hashlib.sha256(hashlib.sha256(meaning).digest() + hashlib.sha256(weights).digest())
    return PeftFolder(about, config, config_file, weights, digest.hexdigest(), pairs)


def _read_config(about: str, folder: Path) -> tuple[bytes, PeftConfig]:
    try:
        content = (folder / CONFIG_FILE).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{about} is no adapter: a folder with {CONFIG_FILE} and {WEIGHTS_FILE} is needed, as PEFT's save_pretrained "
            f"writes it ({CONFIG_FILE}: {error.strerror or error})"
        ) from error
    try:
        config = msgspec.json.decode(content, type=PeftConfig)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{about}: {CONFIG_FILE} is not what PEFT writes: {error}") from error
    if not math.isfinite(config.lora_alpha):
        raise ConfigurationError(f"{about}: lora_alpha in {CONFIG_FILE} must be a number")
    return content, config


def _read_weights(about: str, folder: Path) -> bytes:
    try:
        return (folder / WEIGHTS_FILE).read_bytes()
    except FileNotFoundError as error:
        if (folder / _PICKLE).exists():
            raise ConfigurationError(
                f"{about} has {_PICKLE} alone, and opening a pickle runs what it says: save it as {WEIGHTS_FILE}"
            ) from error
        raise ConfigurationError(f"{about} lacks {WEIGHTS_FILE}") from error
    except OSError as error:
        raise ConfigurationError(f"{about}: {WEIGHTS_FILE} cannot be read: {error.strerror or error}") from error


def _pairs(about: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, LayerPair]:
    sides: dict[str, dict[str, torch.Tensor]] = {}
    strange: list[str] = []
    for key, tensor in tensors.items():
        found = _TENSOR.fullmatch(key.removeprefix(_PREFIX))
        if found is None or tensor.dim() != 2 or not tensor.is_floating_point():
            strange.append(key)
        else:
            sides.setdefault(found["layer"], {})[found["side"]] = tensor
    if strange:
        raise ConfigurationError(
            f"{about} cannot be served: it holds {some_of(strange)}, and only updates of linear layers are served "
            "(lora_A and lora_B)"
        )
    halves = [layer for layer, both in sides.items() if len(both) != 2]
    if halves or not sides:
        raise ConfigurationError(
            f"{about}: {WEIGHTS_FILE} " + (f"lacks one half of {some_of(halves)}" if halves else "holds no updates")
        )
    return {layer: LayerPair(sides[layer]["A"], sides[layer]["B"]) for layer in sorted(sides)}


def _check_config(about: str, config: PeftConfig, pairs: Mapping[str, LayerPair]) -> None:
    besides = [layer for layer in pairs if not config.targets(layer)]
    if besides:
        raise ConfigurationError(
            f"{about}: {WEIGHTS_FILE} changes {some_of(besides)}, which target_modules in {CONFIG_FILE} does not name"
        )
    for layer, (down, up) in pairs.items():
        if not down.shape[0] == up.shape[1] == config.rank(layer):
            raise ConfigurationError(
                f"{about}: {layer} is updated by {tuple(up.shape)} times {tuple(down.shape)}, and {CONFIG_FILE} says that its rank is "
                f"{config.rank(layer)}"
            )
        if not (torch.isfinite(down.float()).all() and torch.isfinite(up.float()).all()):
            raise ConfigurationError(
                f"{about}: the update of {layer} holds infinite numbers or NaN: save the adapter again"
            )


def some_of(names: Collection[str]) -> str:
    shown = sorted(names)[:MISTAKES_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
