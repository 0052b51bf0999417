"""The arguments of the commands that look at a running cluster and change it. What they need is imported when they run."""

from __future__ import annotations

import argparse
import sys
from typing import Any

DRAIN_S = 60.0


def add_commands(commands: Any) -> None:
    status = commands.add_parser("status", help="a running cluster on one screen")
    _add_address(status)
    status.add_argument("--url", help="ask this router alone, from wherever it can be reached")
    status.set_defaults(run=_status)

    scale = commands.add_parser("scale", help="change how many nodes the pools have")
    scale.add_argument("sizes", nargs="+", metavar="POOL=N", help="such as prefill=3 decode=2")
    _add_address(scale)
    scale.set_defaults(run=_scale)

    drain = commands.add_parser("drain", help="let nodes finish what they have, and go")
    drain.add_argument(
        "nodes", nargs="+", metavar="NODE", help="a node's name, or the address of its machine"
    )
    drain.add_argument(
        "--timeout", type=float, default=DRAIN_S, metavar="S", help=f"seconds (default {DRAIN_S:.0f})"
    )
    _add_address(drain)
    drain.set_defaults(run=_drain)

    role = commands.add_parser("role", help="make a node one of another pool, with the weights it has loaded")
    role.add_argument("node", metavar="NODE")
    role.add_argument("role", metavar="ROLE", help="prefill, decode or aggregated")
    _add_address(role)
    role.set_defaults(run=_role)

    down = commands.add_parser("down", help="end everything that `tandem serve` started on a Ray cluster")
    down.add_argument("--now", action="store_true", help="without finishing what is running")
    _add_address(down)
    down.set_defaults(run=_down)


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="a Ray cluster's head (default: the `tandem serve` that runs here, or this machine's cluster)",
    )


def _status(options: argparse.Namespace) -> int:
    from rich.console import Console

    from cluster.api_client import key_from_environment
    from cluster.commands.status import fetch_status, show_status

    key = key_from_environment()
    if options.url:
        return show_status(fetch_status(options.url, key), Console())
    from cluster.commands.operate import with_controller
    from cluster.commands.overview import show_overview

    view = with_controller(options.address, lambda controller: controller.view())
    # A screen as wide as it needs, where nobody looks at it on a terminal.
    return show_overview(view, key, Console(width=None if sys.stdout.isatty() else 160))


def _scale(options: argparse.Namespace) -> int:
    from cluster.commands.operate import scale

    return scale(options.address, options.sizes)


def _drain(options: argparse.Namespace) -> int:
    from cluster.commands.operate import drain

    return drain(options.address, options.nodes, options.timeout)


def _role(options: argparse.Namespace) -> int:
    from cluster.commands.operate import change_role

    return change_role(options.address, options.node, options.role)


def _down(options: argparse.Namespace) -> int:
    from cluster.commands.operate import down

    return down(options.address, now=options.now)
