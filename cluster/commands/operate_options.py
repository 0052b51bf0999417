"""The options of the commands that show a running cluster or change it. A command's imports happen when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tandem.cluster.commands.output import add_output, print_json, print_json_line, wants_json

if TYPE_CHECKING:
    from tandem.cluster.admin import OperatedCluster
    from tandem.cluster.commands.address import WhichCluster

LEVELS = ("debug", "info", "warning", "error")
LEAST_WATCH_S, MOST_WATCH_S = 0.2, 3600.0


def add_commands(commands: Any) -> None:
    status = commands.add_parser("status", help="a running cluster on one screen")
    add_address(status)
    add_output(status)
    status.add_argument("--url", help="ask only this router, from any machine that reaches it")
    status.add_argument("--all", action="store_true", help="list the deployments on that Ray cluster")
    status.add_argument(
        "--watch",
        nargs="?",
        const=2.0,
        type=float,
        metavar="S",
        help="update every S seconds (2), until interrupted",
    )
    status.set_defaults(run=_status)

    scale = commands.add_parser("scale", help="change how many nodes the pools have")
    scale.add_argument("sizes", nargs="+", metavar="POOL=N", help="such as prefill=3 decode=2")
    add_address(scale)
    add_router(scale)
    add_output(scale)
    scale.set_defaults(run=_scale)

    drain = commands.add_parser("drain", help="let nodes finish their requests, then end them")
    drain.add_argument(
        "nodes", nargs="+", metavar="NODE", help="a node's name, or the address of its machine"
    )
    add_limit(drain)
    add_address(drain)
    add_router(drain)
    add_output(drain)
    drain.set_defaults(run=_drain)

    evacuate = commands.add_parser(
        "evacuate", help="empty a machine that is about to go away; other machines take over"
    )
    evacuate.add_argument("machine", metavar="ADDRESS")
    add_limit(evacuate)
    add_address(evacuate)
    add_router(evacuate)
    add_output(evacuate)
    evacuate.set_defaults(run=_evacuate)

    role = commands.add_parser(
        "role", help="move a node to another pool, with the weights that it has loaded"
    )
    role.add_argument("node", metavar="NODE")
    role.add_argument("role", metavar="ROLE", help="prefill, decode or aggregated")
    add_address(role)
    add_router(role)
    add_output(role)
    role.set_defaults(run=_role)

    for name, what, run in (
        ("pause", "hold back new requests; running ones go on", _pause),
        ("resume", "end a pause", _resume),
        (
            "reset-cache",
            "empty prefix caches, in every tier; running requests keep their blocks",
            _reset_cache,
        ),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument(
            "names",
            nargs="*",
            metavar="NAME",
            help="a pool (prefill, decode, aggregated, encode) or a node; none: all",
        )
        add_address(command)
        add_router(command)
        add_output(command)
        command.set_defaults(run=run)

    adapters = commands.add_parser(
        "adapters", help="LoRA adapters of a running cluster: list, load and unload them"
    )
    adapters.add_argument(
        "--load",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters to load: a folder, or NAME=OWNER/NAME on the Hugging Face hub",
    )
    adapters.add_argument("--unload", nargs="+", default=[], metavar="NAME", help="adapters to unload")
    add_address(adapters)
    add_router(adapters)
    add_output(adapters)
    adapters.set_defaults(run=_adapters)

    logs = commands.add_parser("logs", help="the log lines of the cluster's processes, from all machines")
    logs.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a node, a router, controller, or a pool for all of its nodes; none: all",
    )
    logs.add_argument("-f", "--follow", action="store_true", help="also show new lines, until interrupted")
    logs.add_argument("--lines", type=int, metavar="N", help="the last N lines of each process (default 100)")
    logs.add_argument("--since", metavar="TIME", help="only lines of the last TIME, such as 30s, 10m or 2h")
    logs.add_argument("--request", metavar="ID", help="only lines about this request, on every process")
    logs.add_argument("--level", choices=LEVELS, default="debug", help="the lowest level to show")
    add_address(logs)
    add_router(logs)
    add_output(logs)
    logs.set_defaults(run=_logs)

    down = commands.add_parser("down", help="end everything that `tandem serve` started on a Ray cluster")
    down.add_argument("--now", action="store_true", help="do not wait for running requests")
    add_address(down)
    add_output(down)
    down.set_defaults(run=_down)


def add_router(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="go through this router, from any machine, with an operator's key in TANDEM_API_KEY"
    )


def add_address(parser: argparse.ArgumentParser, *, with_name: bool = True) -> None:
    """`with_name` adds --name, unless a setting has that flag already."""
    if with_name:
        parser.add_argument(
            "--name", help="the deployment, if several run on that Ray cluster (default: the only one)"
        )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="a Ray cluster's head (default: the `tandem serve` that runs here, or this machine's cluster)",
    )


def which_cluster(options: argparse.Namespace) -> WhichCluster:
    from tandem.cluster.commands.address import WhichCluster

    return WhichCluster(options.address, options.name)


def _status(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.commands.status import fetch_status, show_status

    if options.all:
        return _list_deployments(options)
    key = key_from_environment()
    if options.watch is not None:
        return _watch_status(options, key)
    if options.url:
        seen = fetch_status(options.url, key)
        if not wants_json(options):
            return show_status(seen, Console())
        print_json(seen)
        return 1 if seen["router"]["unhealthy"] else 0
    from tandem.cluster.commands.operate import with_controller
    from tandem.cluster.commands.overview import answers_now, overview, show_overview

    view = with_controller(which_cluster(options), lambda controller: controller.view())
    if wants_json(options):
        plain = overview(view, key)
        print_json(plain)
        return 0 if answers_now(plain) else 1
    # If the output is not a terminal, the screen is as wide as needed.
    return show_overview(view, key, Console(width=None if sys.stdout.isatty() else 160))


def _list_deployments(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.base.errors import ConfigurationError
    from tandem.cluster.commands.deployments import list_deployments, show_deployments

    if options.url is not None or options.name is not None or options.watch is not None:
        raise ConfigurationError("--all lists every deployment once: leave out --url, --name and --watch")
    found = list_deployments(which_cluster(options))
    if wants_json(options):
        print_json(found)
    else:
        show_deployments(found, Console(width=None if sys.stdout.isatty() else 160))
    return 0 if found and all(one.serves for one in found) else 1


def _watch_status(options: argparse.Namespace, key: str | None) -> int:
    """Shows the status until it is interrupted. Joins the cluster once."""
    import asyncio

    from rich.console import Console

    from tandem.base.errors import ConfigurationError
    from tandem.cluster.commands.operate import with_controller
    from tandem.cluster.commands.overview import overview, show_overview
    from tandem.cluster.commands.status import fetch_status, show_status

    if not LEAST_WATCH_S <= options.watch <= MOST_WATCH_S:
        raise ConfigurationError(
            f"--watch must be seconds from {LEAST_WATCH_S:g} to {MOST_WATCH_S:g}, not {options.watch:g}"
        )
    console, as_lines = Console(), wants_json(options)

    async def watch(look: Callable[[], Awaitable[Callable[[], object]]]) -> int:
        while True:
            show = await look()
            if not as_lines:
                console.clear()
            show()
            await asyncio.sleep(options.watch)

    if options.url:

        async def look_at_router() -> Callable[[], object]:
            seen = await asyncio.to_thread(fetch_status, options.url, key)
            return lambda: print_json_line(seen) if as_lines else show_status(seen, console)

        return asyncio.run(watch(look_at_router))

    async def watch_cluster(controller: OperatedCluster) -> int:
        async def look() -> Callable[[], object]:
            view = await controller.view()
            if as_lines:
                return lambda: print_json_line(overview(view, key))
            return lambda: show_overview(view, key, console)

        return await watch(look)

    return with_controller(which_cluster(options), watch_cluster)


def add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds that nodes may take to finish their requests (default 60)",
    )


def _limit_s(options: argparse.Namespace) -> float:
    from tandem.cluster.control import DRAIN_S

    return DRAIN_S if options.timeout is None else float(options.timeout)


def _aside(options: argparse.Namespace) -> dict[str, Any]:
    from tandem.cluster.commands.operate import say_aside

    return {"say": say_aside} if wants_json(options) else {}


def _scale(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import scale

    lines = scale(which_cluster(options), options.sizes, url=options.url, **_aside(options))
    if wants_json(options):
        print_json({"changes": lines})
    return 0


def _drain(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import drain

    finished = drain(
        which_cluster(options), options.nodes, _limit_s(options), url=options.url, **_aside(options)
    )
    if wants_json(options):
        print_json({"finished": finished})
    return 0 if all(finished.values()) else 1


def _evacuate(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import evacuate

    finished = evacuate(
        which_cluster(options), options.machine, _limit_s(options), url=options.url, **_aside(options)
    )
    if wants_json(options):
        print_json({"finished": finished})
    return 0 if all(finished.values()) else 1


def _role(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import change_role

    role = change_role(which_cluster(options), options.node, options.role, url=options.url, **_aside(options))
    if wants_json(options):
        print_json({"node": options.node, "role": role})
    return 0


def _pause(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import pause

    return _print_paused(
        pause(which_cluster(options), options.names, url=options.url, **_aside(options)), options
    )


def _resume(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import resume

    return _print_paused(
        resume(which_cluster(options), options.names, url=options.url, **_aside(options)), options
    )


def _print_paused(paused: list[str], options: argparse.Namespace) -> int:
    if wants_json(options):
        print_json({"paused": paused})
    return 0


def _reset_cache(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import reset_cache

    done = reset_cache(which_cluster(options), options.names, url=options.url, **_aside(options))
    if wants_json(options):
        print_json({"reset": done})
    return 0


def _adapters(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import adapters

    there = adapters(which_cluster(options), options.load, options.unload, url=options.url, **_aside(options))
    if wants_json(options):
        print_json({"adapters": there})
    return 0


def _logs(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.logs import LogFilter, parse_age, show_logs

    chosen = LogFilter(
        names=options.names,
        lines=options.lines,
        since_s=parse_age(options.since) if options.since is not None else None,
        request=options.request,
        level=options.level,
    )
    show_logs(
        which_cluster(options), chosen, follow=options.follow, as_json=wants_json(options), url=options.url
    )
    return 0


def _down(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import down

    finished = down(which_cluster(options), now=options.now, **_aside(options))
    if wants_json(options):
        print_json({"finished": finished})
    return 0
