"""The commands that use a running cluster and look at it: their options, and what they print."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from tandem.base.flags import adder
from tandem.cluster.commands.options import add_address, add_operated, add_server, which_cluster
from tandem.cluster.commands.output import add_output, print_found, print_json, print_json_line, wants_json
from tandem.cluster.commands.parser import LOOK, Command

if TYPE_CHECKING:
    from tandem.cluster.orders import OperatedCluster

LEVELS = ("debug", "info", "warning", "error")
LEAST_WATCH_S, MOST_WATCH_S = 0.2, 3600.0


def _describe_status(parser: argparse.ArgumentParser) -> None:
    add_address(parser)
    add_output(parser)
    add = adder(parser)
    add("--url", None, str, "ask only this router, from any machine that reaches it")
    add("--all", None, False, "list the deployments on that Ray cluster")
    add("--watch", "S", float, "update every S seconds (2), until interrupted", nargs="?", const=2.0)


def _status(options: argparse.Namespace) -> int:
    """Looks once, or with --watch until it is interrupted. Joins the cluster once."""
    import asyncio

    from rich.console import Console

    from tandem.base.errors import ConfigurationError
    from tandem.base.own_thread import from_own_thread
    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.commands.operate import with_controller
    from tandem.cluster.commands.overview import Overview
    from tandem.cluster.orders import ViewOrder

    if options.all:
        return _list_deployments(options)
    if options.watch is not None and not LEAST_WATCH_S <= options.watch <= MOST_WATCH_S:
        raise ConfigurationError(
            f"--watch must be seconds from {LEAST_WATCH_S:g} to {MOST_WATCH_S:g}, not {options.watch:g}"
        )
    key, as_json = key_from_environment(), wants_json(options)
    stdout = sys.stdout  # which goes to the log while a cluster is joined

    async def look(cluster: OperatedCluster | None) -> Overview:
        if cluster is not None:
            return Overview.of(await cluster.ask(ViewOrder()), key)
        return await from_own_thread("look", lambda: Overview.of_router(options.url, key))

    async def watch(cluster: OperatedCluster | None) -> Overview:
        console = Console(file=stdout)
        while options.watch is not None:
            seen = await look(cluster)
            if as_json:
                print_json_line(seen.json(), stdout)
            else:
                console.clear()
                seen.show(console)
            await asyncio.sleep(options.watch)
        return await look(cluster)

    seen = asyncio.run(watch(None)) if options.url else with_controller(which_cluster(options), watch)
    if as_json:
        print_json(seen.json())
    else:
        # If the output is not a terminal, the screen is as wide as needed.
        seen.show(Console(width=None if options.url or sys.stdout.isatty() else 160))
    return 0 if seen.serves else 1


def _list_deployments(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.base.errors import ConfigurationError
    from tandem.cluster.commands.deployments import list_deployments, show_deployments

    if options.url is not None or options.name is not None or options.watch is not None:
        raise ConfigurationError("--all lists every deployment once: leave out --url, --name and --watch")
    found = list_deployments(which_cluster(options))
    print_found(options, found, lambda: show_deployments(found, Console(width=None if sys.stdout.isatty() else 160)))
    return 0 if found and all(one.serves for one in found) else 1


def _describe_top(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    add = adder(parser)
    add("--once", None, False, "print it once, then end")
    add("--every", "S", 2.0, "seconds between two updates (default 2)")
    add_output(parser)


def _top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import ApiClient, key_from_environment
    from tandem.cluster.commands.router_url import choose_url
    from tandem.cluster.commands.top import run

    with closing(ApiClient(choose_url(options.url), key_from_environment())) as client:
        return run(client, Console(), options.every, once=options.once, as_json=wants_json(options))


def _describe_logs(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("names", "NAME", str, "a node, a router, controller, or a pool for all of its nodes; none: all", nargs="*")
    parser.add_argument("-f", "--follow", action="store_true", help="also show new lines, until interrupted")
    add("--lines", "N", int, "the last N lines of each process (default 100)")
    add("--since", "TIME", str, "only lines of the last TIME, such as 30s, 10m or 2h")
    add("--request", "ID", str, "only lines about this request, on every process")
    parser.add_argument("--level", choices=LEVELS, default="debug", help="the lowest level to show")
    add_operated(parser)


def _logs(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.logs import LogFilter, parse_age, show_logs

    chosen = LogFilter(
        names=options.names,
        lines=options.lines,
        since_s=parse_age(options.since) if options.since is not None else None,
        request=options.request,
        level=options.level,
    )
    show_logs(which_cluster(options), chosen, follow=options.follow, as_json=wants_json(options), url=options.url)
    return 0


COMMANDS = (
    Command("status", "a running cluster on one screen", LOOK, _describe_status, _status),
    Command("top", "the cluster as it is now, and its slowest requests by cause", LOOK, _describe_top, _top),
    Command("logs", "the log lines of the cluster's processes, from all machines", LOOK, _describe_logs, _logs),
)  # fmt: skip
