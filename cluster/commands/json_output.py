"""`-o json`, on every command that prints: its answer as JSON on standard output, and nothing else there."""

from __future__ import annotations

import argparse
import sys


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--format", choices=("text", "json"), default="text", help="(%(default)s)")


def wants_json(options: argparse.Namespace) -> bool:
    return str(options.format) == "json"


def print_json(value: object) -> None:
    from tandem.cluster.saving import as_json

    sys.stdout.write(as_json(value).decode())
    sys.stdout.flush()
