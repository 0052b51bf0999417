"""The commands of this folder, as `tandem` finds them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from tandem.base.flags import adder
from tandem.base.wings import find_wings
from tandem.cluster.commands.options import add_server
from tandem.cluster.commands.output import add_output, print_found, print_json, wants_json
from tandem.cluster.commands.parser import LOOK, Command
from tandem.cluster.commands.setting_options import add_settings

if TYPE_CHECKING:
    from tandem.cluster.trace.command import TraceClient
    from tandem.cluster.trace.why import Explanation
    from tandem.router.page_state import PageState

# What other rooms add to `tandem why`.
ROWS = ("tandem.simulator.commands",)


class ExplainingWing(Protocol):
    """What such a module has. It is imported with the commands of this folder."""

    def describe_why(self, parser: argparse.ArgumentParser) -> None:
        """Adds what it can tell about one request to the options of `tandem why`."""

    def explain_more(
        self, options: argparse.Namespace, why: Explanation, state: Callable[[], PageState]
    ) -> Explanation:
        """Returns the explanation with what those options ask for."""


def wings() -> list[ExplainingWing]:
    return [cast("ExplainingWing", module) for module in find_wings(ROWS)]


def _describe_trace(parser: argparse.ArgumentParser) -> None:
    adder(parser)("request", "REQUEST_ID", str, "its id, or its answer's (default: list the last ones)", nargs="?")
    add_server(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a picture too, .png or .svg")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the whole record; - for standard output")
    add_output(parser)


def _trace(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.trace.command import run

    with _client(options) as client:
        if wants_json(options) and options.request is None:
            print_json(client.recent())
            return 0
        as_json = wants_json(options)
        return run(client, Console(), options.request, options.picture, options.json, as_json=as_json)


def _describe_why(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="REQUEST_ID", help="its id, or its answer's")
    add_server(parser)
    for wing in wings():
        wing.describe_why(parser)
    add_settings(parser, serves=False)
    add_output(parser)


def _why(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.trace.command import explained
    from tandem.cluster.trace.why_text import show_explanation

    with _client(options) as client:
        explanation = explained(client, options.request)
        for wing in wings():
            explanation = wing.explain_more(options, explanation, client.state)
    print_found(options, explanation, lambda: show_explanation(Console(), explanation))
    return 0


def _client(options: argparse.Namespace) -> closing[TraceClient]:
    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.commands.router_url import choose_url
    from tandem.cluster.trace.command import TraceClient

    return closing(TraceClient(choose_url(options.url), key_from_environment()))


COMMANDS = (
    Command("trace", "where one request's time went", LOOK, _describe_trace, _trace),
    Command("why", "every millisecond of one request: what it waited for", LOOK, _describe_why, _why),
)
