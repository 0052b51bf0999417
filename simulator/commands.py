"""The commands of this room, as `tandem` finds them. Their imports happen when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tandem.cluster.commands.output import add_output, print_json, wants_json
from tandem.cluster.commands.parser import MEASURE, Command
from tandem.cluster.commands.setting_options import add_settings, read_settings

if TYPE_CHECKING:
    from tandem.cluster.config import TandemConfig
    from tandem.cluster.trace.why import Explanation
    from tandem.router.page_state import PageState


def describe_why(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.options import add_costs

    add_costs(parser, "also simulate the request in other clusters, with these costs", required=False)


def explain_more(
    options: argparse.Namespace, why: Explanation, state: Callable[[], PageState]
) -> Explanation:
    if options.costs is None:
        return why
    from rich.console import Console

    from tandem.simulator.options import costs_of
    from tandem.simulator.what_if import compared

    config, costs = read_settings(options).config, costs_of(options)
    return compared(why, state(), config, costs, Console(stderr=True))


def _describe_simulate(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.command import add_arguments

    add_arguments(parser)
    add_settings(parser, serves=False)
    add_output(parser)


def _describe_profile(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.profile_command import add_arguments

    add_arguments(parser)
    add_output(parser)


def _describe_plan(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.plan_command import add_arguments

    add_arguments(parser)
    add_settings(parser, serves=False)
    add_output(parser)


def _run_profile(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.router_url import choose_url
    from tandem.simulator.profile_command import run

    options.url = choose_url(options.url)
    costs = run(options, as_json=wants_json(options))
    if wants_json(options):
        print_json(costs)
    return 0


def _run_simulate(options: argparse.Namespace) -> int:
    from tandem.simulator.command import run

    result = run(options, read_settings(options).config, as_json=wants_json(options))
    if wants_json(options):
        print_json(result)
    return 0


def _run_plan(options: argparse.Namespace) -> int:
    from tandem.simulator.plan_command import run

    def configure(more: Mapping[str, str]) -> TandemConfig:
        given = argparse.Namespace(**vars(options))
        given.set = [*options.set, *(f"{name}={value}" for name, value in more.items())]
        return read_settings(given).config

    plan = run(options, configure, as_json=wants_json(options))
    if wants_json(options):
        print_json(plan)
    return 0 if plan.chosen is not None else 1


def _describe_what_if(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.change_command import add_arguments

    add_arguments(parser)
    add_settings(parser, serves=False)
    add_output(parser)


def _run_what_if(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.router_url import choose_url
    from tandem.simulator.change_command import run

    options.url = choose_url(options.url)
    change = run(options, read_settings(options).config, as_json=wants_json(options))
    if wants_json(options):
        print_json(change)
    return 0


COMMANDS = (
    Command("profile", "measure what a node's steps take, for `tandem simulate`", MEASURE, _describe_profile, _run_profile),
    Command("simulate", "simulate how a cluster would serve given traffic", MEASURE, _describe_simulate, _run_simulate),
    Command("plan", "how many nodes of each role given traffic needs, and what they cost", MEASURE, _describe_plan, _run_plan),
    Command("what-if", "what other sizes of the pools would do to the requests of the last minutes", MEASURE, _describe_what_if, _run_what_if),
)  # fmt: skip
