"""The commands of this room, as `tandem` finds them. Their imports happen when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.cluster.commands.parser import MEASURE, command_of
from tandem.cluster.commands.setting_options import read_settings

if TYPE_CHECKING:
    from tandem.cluster.trace.why import Explanation
    from tandem.router.page_state import PageState


def describe_why(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.options import add_costs

    add_costs(parser, "also simulate the request in other clusters, with these costs", required=False)


def explain_more(options: argparse.Namespace, why: Explanation, state: Callable[[], PageState]) -> Explanation:
    from tandem.simulator.options import given_costs

    if (costs := given_costs(options)) is None:
        return why
    from rich.console import Console

    from tandem.simulator.what_if import compared

    return compared(why, state(), read_settings(options).config, costs, Console(stderr=True))


_ROWS = (
    ("profile_command", "profile", "measure what a node's steps take, for `tandem simulate`"),
    ("command", "simulate", "simulate how a cluster would serve given traffic"),
    ("plan_command", "plan", "how many nodes of each role given traffic needs, and what they cost"),
    ("change_command", "what-if", "what other sizes of the pools would do to the requests of the last minutes"),
)
COMMANDS = tuple(command_of(f"tandem.simulator.{module}", name, help, MEASURE) for module, name, help in _ROWS)
