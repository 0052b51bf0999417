"""Options that several commands have, and what they say."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tandem.base.flags import adder
from tandem.cluster.commands.output import add_output, wants_json

if TYPE_CHECKING:
    from tandem.cluster.commands.address import WhichCluster
    from tandem.cluster.commands.operate import CommandTarget


def add_server(parser: argparse.ArgumentParser) -> None:
    where = "where the router listens (default: the `tandem serve` that runs on this machine, whatever its port)"
    adder(parser)("--url", None, str, where)


def add_router(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="go through this router, from any machine, with an operator's key in TANDEM_API_KEY"
    )


def add_address(parser: argparse.ArgumentParser, *, with_name: bool = True) -> None:
    """`with_name` adds --name, unless a setting has that flag already."""
    add = adder(parser)
    if with_name:
        add("--name", None, str, "the deployment, if several run on that Ray cluster (default: the only one)")
    where = "a Ray cluster's head (default: the `tandem serve` that runs here, or this machine's cluster)"
    add("--address", "HOST:PORT", str, where)


def add_operated(parser: argparse.ArgumentParser) -> None:
    add_address(parser)
    add_router(parser)
    add_output(parser)


def which_cluster(options: argparse.Namespace) -> WhichCluster:
    from tandem.cluster.commands.address import WhichCluster

    return WhichCluster(options.address, options.name)


def target_of(options: argparse.Namespace) -> CommandTarget:
    from tandem.cluster.commands.operate import CommandTarget, say_aside, say_line

    return CommandTarget(which_cluster(options), options.url, say_aside if wants_json(options) else say_line)
