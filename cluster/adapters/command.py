"""`tandem adapters`: lists, loads and unloads LoRA adapters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tandem.base.errors import ConfigurationError
from tandem.cluster.commands.operate import CommandTarget
from tandem.cluster.commands.options import add_operated, target_of
from tandem.cluster.commands.output import print_found
from tandem.cluster.orders import AdaptersOrder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters to load: a folder, or NAME=OWNER/NAME on the Hugging Face hub",
    )
    parser.add_argument("--unload", nargs="+", default=[], metavar="NAME", help="adapters to unload")
    add_operated(parser)


def run(options: argparse.Namespace) -> int:
    there = adapters(target_of(options), options.load, options.unload)
    print_found(options, {"adapters": there})
    return 0


def adapters(target: CommandTarget, load: Sequence[str], unload: Sequence[str]) -> dict[str, str]:
    """`load` has NAME=FOLDER, or NAME=OWNER/NAME on the hub. Nodes get the absolute path of a folder on this machine."""
    places = dict(map(_adapter_of, load))
    there = target.ask(AdaptersOrder(places, list(unload)), silently=not load and not unload)
    for name, where in sorted(there.items()):
        target.say(f"{name}: {where}")
    if not there:
        target.say("no adapters are served")
    return there


def _adapter_of(word: str) -> tuple[str, str]:
    name, _, where = word.partition("=")
    if not name or not where:
        raise ConfigurationError(
            f"{word!r} must be NAME=FOLDER, or NAME=OWNER/NAME on the Hugging Face hub, such as sql=./adapters/sql"
        )
    folder = Path(where).expanduser()
    return name, str(folder.resolve()) if folder.is_dir() else where
