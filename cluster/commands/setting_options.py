"""The flags that set settings, and the configuration that results from a command's flags, file and environment."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cluster.vllm_flags import add_flags, read_flags, translated

if TYPE_CHECKING:
    from tandem.cluster.setting_layers import Layer
    from tandem.cluster.settings import Settings

DEFAULT_FILE = "tandem.yaml"
# Flags that set one setting: flag -> (setting, placeholder of the value, help).
# Flags that set one setting: flag -> (setting, what it shows for a value, help).
_SETTING_FLAGS = {
    "--model": ("model.path", "NAME", "a folder, a GGUF file, a Hugging Face name, or smollm2 (the default)"),
    "--prefill": ("pools.prefill", "N", "nodes that read prompts (default 1)"),
    "--decode": ("pools.decode", "N", "nodes that write answers (default 1)"),
    "--aggregated": ("pools.aggregated", "N", "instead of the two: nodes that do both"),
    "--encode": ("pools.encode", "N", "nodes that encode images, for a model that reads them (default 0)"),
    "--host": ("router.host", "ADDRESS", "where the router listens (default 127.0.0.1)"),
    "--name": ("name", "NAME", "this deployment's name, unique on its Ray cluster (default tandem)"),
    "--port": ("router.port", "P", "where the router listens (default 8000; 0 takes a free one)"),
    "--dtype": ("model.dtype", "TYPE", "auto, float32, bfloat16 or float16"),
    "--max-model-len": ("scheduler.max_model_len", "TOKENS", "longest prompt and answer together"),
    "--kv-memory": ("cache.memory_bytes", "SIZE", "memory for the KV cache of each node, such as 2GiB"),
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    # Values stay text here: the settings' types check them, and all mistakes are reported at once.
    parser.add_argument(
        "--config", metavar="FILE", help=f"settings (default: {DEFAULT_FILE}, where there is one)"
    )
    for flag, (_, metavar, text) in _SETTING_FLAGS.items():
        parser.add_argument(flag, metavar=metavar, help=text)
    add_flags(parser, besides=_SETTING_FLAGS)
    parser.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="any other setting"
    )


def read_settings(options: argparse.Namespace) -> Settings:
    """Combines defaults, file, environment and flags; later ones win. Raises SettingsError."""
    from tandem.cluster.setting_layers import read_environment, read_file
    from tandem.cluster.settings import resolve

    layers: list[Layer] = []
    if options.config is not None:
        layers.append(read_file(Path(options.config)))
    elif Path(DEFAULT_FILE).exists():
        layers.append(read_file(Path(DEFAULT_FILE)))
    return resolve([*layers, read_environment(os.environ), flags_of(options)])


def flags_of(options: argparse.Namespace) -> Layer:
    from tandem.cluster.setting_layers import read_assignments

    assignments, answers = read_flags(options.foreign)
    for text in options.set:
        name, given, value = text.partition("=")
        assignments.append((name.strip(), value.strip() if given else None, "--set"))
    for flag, (setting, _, _) in _SETTING_FLAGS.items():
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            meant = translated(flag, value) or [(setting, value)]
            assignments += [(name, text, flag) for name, text in meant]
    model = getattr(options, "served", None)
    if model is not None:
        if options.model not in (None, model):
            answers.append(f"MODEL {model} and --model {options.model} name two models: leave one out")
        assignments.append(("model.path", model, "MODEL"))
    flags = read_assignments(assignments)
    flags.mistakes += answers
    return flags
