"""The flags that set settings, and the configuration that results from a command's flags, file and environment."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cluster.wings import foreign_flags

if TYPE_CHECKING:
    from tandem.cluster.settings.combined import Settings
    from tandem.cluster.settings.layers import Layer

DEFAULT_FILE = "tandem.yaml"

# Flags that set one setting, by what they are about: flag -> (setting, placeholder of the value, help).
_GROUPS = {
    "the model": {
        "--model": ("model.path", "NAME", "a folder, a GGUF file, a Hugging Face name, or smollm2 (the default)"),
        "--max-model-len": ("scheduler.max_model_len", "TOKENS", "longest prompt and answer together"),
        "--dtype": ("model.dtype", "TYPE", "auto, float32, bfloat16 or float16"),
        "--engine": (
            "model.engine",
            "NAME",
            "tandem (the default), or vllm from the Python that model.engine_python names",
        ),
    },
    "nodes": {
        "--prefill": ("pools.prefill", "N", "prefill nodes, which compute prompts (default 1)"),
        "--decode": ("pools.decode", "N", "decode nodes, which generate tokens (default 1)"),
        "--aggregated": ("pools.aggregated", "N", "aggregated nodes, which do both, instead of the two"),
        "--encode": ("pools.encode", "N", "encoder nodes, for a model that reads images (default 0)"),
        "--kv-memory": ("cache.memory_bytes", "SIZE", "memory for the KV cache of each node, such as 2GiB"),
    },
    "the router": {
        "--host": ("router.host", "ADDRESS", "where the router listens (default 127.0.0.1)"),
        "--port": ("router.port", "P", "where the router listens (default 8000; 0 takes a free one)"),
        "--name": ("name", "NAME", "this deployment's name, unique on its Ray cluster (default tandem)"),
    },
}
_SETTING_FLAGS = {flag: rest for flags in _GROUPS.values() for flag, rest in flags.items()}


def add_settings(parser: argparse.ArgumentParser, *, serves: bool = True) -> None:
    """`serves`: the command is about a cluster that serves. Otherwise its router means nothing, and --help does not name those flags."""
    # Values stay text here: the settings' types check them, and all mistakes are reported at once.
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for flag, (_, metavar, text) in flags.items():
            hidden = title == "the router" and not serves
            group.add_argument(flag, metavar=metavar, help=argparse.SUPPRESS if hidden else text)
    others = parser.add_argument_group("all settings")
    others.add_argument(
        "--config", metavar="FILE", help=f"a file of settings (default: {DEFAULT_FILE}, where there is one)"
    )
    others.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="any setting; `tandem init` writes a file that explains them",
    )
    for foreign in foreign_flags():
        foreign.add_flags(parser, besides=_SETTING_FLAGS)


def read_settings(options: argparse.Namespace) -> Settings:
    """Combines defaults, file, environment and flags; later ones win. Raises SettingsError."""
    from tandem.cluster.settings.combined import resolve
    from tandem.cluster.settings.layers import read_environment, read_file

    layers: list[Layer] = []
    if options.config is not None:
        layers.append(read_file(Path(options.config)))
    elif _is_here(Path(DEFAULT_FILE)):
        layers.append(read_file(Path(DEFAULT_FILE)))
    return resolve([*layers, read_environment(os.environ), flags_of(options)])


def _is_here(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # as in a folder that this user cannot enter: reading it says so
        return True


def flags_of(options: argparse.Namespace) -> Layer:
    from tandem.cluster.settings.layers import read_assignments

    assignments: list[tuple[str, str | None, str]] = []
    answers: list[str] = []
    for foreign in foreign_flags():
        given, refused = foreign.read_flags(options.foreign)
        assignments += given
        answers += refused
    for text in options.set:
        name, given, value = text.partition("=")
        assignments.append((name.strip(), value.strip() if given else None, "--set"))
    for flag, (setting, _, _) in _SETTING_FLAGS.items():
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            meant = [one for foreign in foreign_flags() for one in foreign.translated(flag, value)]
            assignments += [(name, text, flag) for name, text in meant or [(setting, value)]]
    model = getattr(options, "served", None)
    if model is not None:
        if options.model not in (None, model):
            answers.append(f"MODEL {model} and --model {options.model} name two models: leave one out")
        assignments.append(("model.path", model, "MODEL"))
    flags = read_assignments(assignments)
    flags.mistakes += answers
    return flags
